"""A chunk's tokens shared by all ranks, where the cache's heads are split over head groups: heads for tokens, and back.

N ranks are K head groups, in rank order, whose caches share the tokens in the same way. The K ranks at one place of
their head groups hold the same tokens, each some of the heads. In a prefill each runs 1/K of these tokens with all
heads; before attention it sends the others their heads, and afterwards the results come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from .. import comm

Runs = list[tuple[int, int]]


def shares_by_rank(shares: Sequence[Runs], num_groups: int) -> list[Runs]:
    """By rank of all head groups: the tokens that it runs, as runs (position, count); shares[p] those of place p."""
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
