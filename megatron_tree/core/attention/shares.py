"""What ranks have of the heads and of the tokens of a call over a cache, where they split the weights.

Head shares: how many query heads each rank has. Token shares: which new tokens each rank runs, as runs of positions.

N ranks are K head groups, in rank order, whose caches share the tokens in the same way. The K ranks at one place of
their head groups hold the same tokens, each some of the heads. In a prefill each runs 1/K of these tokens with all
heads; before attention it sends the others their heads, and afterwards the results come back (`HeadsForTokens`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..config import integers


def check_head_shares(shares: Sequence[int] | None, q: Tensor, ranks: comm.Ranks) -> tuple[int, ...] | None:
    """The shares as a tuple; ``ValueError`` unless there is one for each rank, and q has this rank's heads or all."""
    if shares is None:
        return None
    world, rank = ranks.size, ranks.rank
    given, shares = shares, integers(shares, 0)
    if shares is None or len(shares) != world or not sum(shares):
        raise ValueError(f"head_shares={given!r} must hold the number of query heads of each of the {world} ranks")
    is_known = isinstance(q, Tensor) and q.dim() == 4
    if not is_known or q.shape[2] not in (shares[rank], sum(shares)):
        seen = f"shape {tuple(q.shape)}" if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(
            f"q must be [batch, sequence, {shares[rank]} heads, head_dim], since head_shares={list(shares)} gives "
            f"rank {rank} of cp_group {shares[rank]} heads, or, on all ranks, have all {sum(shares)}; got {seen}"
        )
    return shares


def has_all_heads(q: Tensor, shares: tuple[int, ...] | None) -> bool:
    """Whether q [b, s, any, d] has the heads of all ranks, so that none are gathered.

    If one rank has all of them by its share, the others can't know what it means: they are gathered from that rank,
    whatever the others pass.
    """
    return shares is None or len(shares) == 1 or q.shape[2] == sum(shares) > max(shares)


def all_heads_of(q: Tensor, shares: tuple[int, ...] | None) -> Tensor:
    """A stand-in of the shape that q [b, s, h_local, d] has when all heads are gathered, without memory of its own."""
    return q if has_all_heads(q, shares) else q.new_empty(1).expand(*q.shape[:2], sum(shares), q.shape[3])


def gather_heads(q: Tensor, shares: tuple[int, ...], ranks: comm.Ranks, exchanged: bool) -> Tensor:
    """q [b, s, h_local, d] of every rank -> [b, s, h, d], heads in rank order. exchanged: see `Ranks.gather_rows`."""
    if has_all_heads(q, shares):
        return q
    mine = q[:, :, : shares[ranks.rank]].permute(2, 0, 1, 3).contiguous()
    return ranks.gather_rows(mine, shares, exchanged=exchanged).permute(1, 2, 0, 3)


def heads_of(x: Tensor, shares: tuple[int, ...], order: tuple[int, ...], dim: int) -> Tensor:
    """The heads of some ranks among all heads x, in rank order."""
    of_ranks = x.split(shares, dim)
    return torch.cat([of_ranks[r] for r in sorted(order)], dim)


@functools.lru_cache(maxsize=64)
def rows_of_heads(shares: tuple[int, ...], order: tuple[int, ...], device: torch.device) -> Tensor | None:
    """The row of every head, in rank order, in what these ranks send, padded to the longest share each; None if heads
    lie so anyway."""
    if min(shares) == max(shares) and list(order) == sorted(order):
        return None
    rows = [order.index(r) * max(shares) + i for r in sorted(order) for i in range(shares[r])]
    return torch.tensor(rows, device=device, dtype=torch.int64)


def slice_of(shares: tuple[int, ...], rank: int) -> slice:
    """Where a rank's heads are among all heads."""
    first = sum(shares[:rank])
    return slice(first, first + shares[rank])


Runs = list[tuple[int, int]]


def shares_by_rank(shares: Sequence[Runs], num_groups: int) -> list[Runs]:
    """By rank of all head groups: the tokens that it runs, as runs (position, count); shares[p] belongs to place p."""
    parts = [_cut(runs, num_groups) for runs in shares]
    return [part[group] for group in range(num_groups) for part in parts]


def _cut(runs: Runs, n: int) -> list[Runs]:
    """Runs of tokens in n parts of equal length, give or take one."""
    total = count_tokens(runs)
    ends = [total * (i + 1) // n for i in range(n)]
    parts, done = [[] for _ in range(n)], 0
    for position, count in runs:
        for i, end in enumerate(ends):
            first, stop = max(done, ends[i - 1] if i else 0), min(done + count, end)
            if first < stop:
                parts[i].append((position + first - done, stop - first))
        done += count
    return parts


def count_tokens(runs: Runs) -> int:
    """Tokens of some runs."""
    return sum(count for _, count in runs)


class HeadsForTokens:
    """The exchange among the K ranks at one place of their head groups.

    team: these ranks, in the order of the head groups. lengths: tokens that each of them runs.
    """

    def __init__(self, team: comm.Team, lengths: Sequence[int]):
        self._team, self._lengths = team, lengths
        self._place = team.index
        self._own = lengths[self._place]

    def own_heads(self, x: Tensor, dim: int) -> Tensor:
        """Of a tensor with all heads: this rank's."""
        return x.chunk(self._team.size, dim)[self._place]

    def to_heads(self, x: Tensor) -> Tensor:
        """x [1, n, h, d], this rank's tokens, and rows that are ignored -> [1, tokens of the place, h / K, d]."""
        parts = x[0, : self._own].chunk(self._team.size, 1)
        return comm.start_all_to_all_v(list(parts), self._lengths, self._team).wait()[None]

    def to_tokens(self, x: Tensor, *, num_rows: int) -> Tensor:
        """`to_heads` back: x [1, tokens of the place, h / K, d] -> [1, num_rows, h, d], padded with zeros."""
        k, parts = self._team.size, list(x[0].split(tuple(self._lengths)))
        arrived = comm.start_all_to_all_v(parts, [self._own] * k, self._team).wait()
        whole = arrived.unflatten(0, (k, self._own)).transpose(0, 1).flatten(1, 2)
        return F.pad(whole, (0, 0, 0, 0, 0, num_rows - self._own))[None]
