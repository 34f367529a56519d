"""Queries whose heads are split over the ranks of a cache: heads are gathered, and each rank gets those of its share.

`shares` holds the number of heads of every rank, in rank order. In a message every rank's heads are padded to the
longest share, so that all messages are of one size. Ranks that compute the queries of all heads have nothing to gather.
Prefills gather over a team: the whole group, or a column of a grid, whose heads stay in rank order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
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
