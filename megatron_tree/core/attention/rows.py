"""The rows of queries or keys that a cell works on: how they arrive, and how results return to their ranks.

Each kind of rows has the segments `arriving`, of all rows that arrive here, and the same methods:

- `start_gather(*tensors)`: start to send this rank's rows [b, s, h, d_i]; `wait()` of what it returns gives those that
  arrive here, [b, rows, h, d_i] each
- `start_reduce(x, reducer)`: start to send results [b, rows, h, w] of the rows that have arrived back to their ranks
- `reduced`, `put_reduced`: wait for this rank's results

Where `travel` is false, the rows are this rank's own and nothing is sent. `TeamRows` and `VisibleRows` also know the
segments `local`, of this rank's rows, and `others`, of the rest of those that arrive.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..layout import Segment, Sharding
from ..merge import StateReducer, SumReducer
from .shares import has_all_heads, heads_of, rows_of_heads

Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class TeamRows:
    """All rows of a team's ranks: an all-gather, and a reduce-scatter back."""

    team: comm.Team
    num_rows: int
    """Each rank's rows are padded to this number on the wire."""
    arriving: Segments
    local: Segments = ()
    others: Segments = ()
    at: slice | None = None
    """This rank's rows among those that arrive."""

    @classmethod
    def of(cls, team: comm.Team, sharding: Sharding, holders: tuple[tuple[int, ...], ...]) -> TeamRows:
        """The rows of a sharded sequence that a team gathers, whose ranks are these holders."""
        i = team.index
        return cls(
            team,
            num_rows=len(holders[i]) * sharding.rows,
            arriving=sharding.segments(*holders),
            local=sharding.segments(holders[i]),
            others=sharding.segments(*holders, skip=i),
            at=sharding.rows_of(holders[i], at=i),
        )

    @functools.cached_property
    def travel(self) -> bool:
        return self.team.size > 1

    def start_gather(self, *tensors: Tensor) -> Gather | LocalRows:
        if not self.travel:
            return LocalRows(tensors)
        packed = _packed(tensors)
        missing = self.num_rows - packed.shape[0]
        padded = F.pad(packed, (0, 0) * 3 + (0, missing)) if missing else packed
        return Gather(comm.start_gather(padded, self.team), _widths(tensors))

    def put_local(self, gathered: Tensor, local: Tensor) -> None:
        """Put this rank's results [b, s, h, w] among the results of all rows that have arrived."""
        gathered[:, self.at] = local

    def start_reduce(self, x: Tensor, reducer: StateReducer | SumReducer) -> comm.Pending:
        return comm.start_reduce_scatter(x.transpose(0, 1), self.team, reducer)

    def reduced(self, pending: comm.Pending, num_rows: int) -> Tensor:
        """This rank's results [b, num_rows, h, w]."""
        return pending.wait().transpose(0, 1)[:, :num_rows]

    def put_reduced(self, pending: comm.Pending, *local: Tensor) -> None:
        """Replace this rank's sums by the sums of all ranks, of which they are a part."""
        sums = self.reduced(pending, local[0].shape[1]).split(_widths(local), -1)
        for x, total in zip(local, sums):
            x.copy_(total)


class VisibleRows(NamedTuple):
    """The rows of keys that this rank's queries see (the cast). Gradients return and are added up, rank by rank."""

    team: comm.Team
    local: Segments
    sent: tuple[Segments, ...]
    """By rank of the team: segments of this rank's keys that its queries see; none for this rank itself."""
    lengths: tuple[int, ...]
    """By rank of the team: how many rows it sends here."""
    arriving: Segments

    travel = True

    @property
    def others(self) -> Segments:
        return self.arriving

    def start_gather(self, *tensors: Tensor) -> Gather:
        packed = _packed(tensors)
        rows = [[packed[s.row : s.row + s.length] for s in segments] for segments in self.sent]
        parts = [torch.cat(x) if x else packed[:0] for x in rows]
        return Gather(comm.start_all_to_all_v(parts, self.lengths, self.team), _widths(tensors))

    def put_local(self, gathered: Tensor, local: Tensor) -> None:
        """This rank's rows are not among those that arrive."""

    def start_reduce(self, x: Tensor, reducer: SumReducer) -> comm.Pending:
        lengths = [sum(s.length for s in segments) for segments in self.sent]
        return comm.start_all_to_all_v(list(x.transpose(0, 1).split(self.lengths)), lengths, self.team)

    def put_reduced(self, pending: comm.Pending, *local: Tensor) -> None:
        """Add what returns to this rank's sums, in the team's order."""
        returned = pending.wait().transpose(0, 1).to(local[0].dtype).split(_widths(local), -1)
        for x, part in zip(local, returned):
            row = 0
            for s in (s for segments in self.sent for s in segments):
                x[:, s.row : s.row + s.length] += part[:, row : row + s.length]
                row += s.length


class HeadRows(NamedTuple):
    """A prefill's queries whose heads are split over the ranks (shares.py): the heads of a team's ranks."""

    team: comm.Team
    arriving: Segments
    shares: tuple[int, ...]
    """Heads of every rank of the group."""

    @property
    def travel(self) -> bool:
        return self.team.size > 1

    def start_gather(self, q: Tensor) -> GatherOfHeads | LocalRows:
        """q [b, s, h_local, d], or with all heads; [b, s, h, d] arrive, the team's heads in rank order."""
        if has_all_heads(q, self.shares):
            whole = self.team.size == len(self.shares)
            return LocalRows((q if whole else heads_of(q, self.shares, self.team.order, 2),))
        q = q[:, :, : self.num_local]
        if not self.travel:
            return LocalRows((q,))
        mine = F.pad(q.permute(2, 0, 1, 3), (0, 0) * 3 + (0, max(self.shares) - q.shape[2])).contiguous()
        return GatherOfHeads(comm.start_gather(mine, self.team), rows_of_heads(self.shares, self.team.order, q.device))

    def start_reduce(self, x: Tensor, reducer: StateReducer) -> comm.Pending:
        of_ranks = comm.by_owner(x.permute(2, 0, 1, 3), self.shares, self.team.order)  # [ranks, longest share, b, s, w]
        return comm.start_reduce_scatter(of_ranks.flatten(0, 1), self.team, reducer)

    def reduced(self, pending: comm.Pending, num_rows: int) -> Tensor:
        return pending.wait()[: self.num_local].permute(1, 2, 0, 3)

    @property
    def num_local(self) -> int:
        return self.shares[self.team.ranks.rank]


class Gather(NamedTuple):
    """Rows on their way, several tensors in one message."""

    pending: comm.Pending
    widths: list[int]

    def wait(self) -> tuple[Tensor, ...]:
        return self.pending.wait().transpose(0, 1).split(self.widths, -1)


class GatherOfHeads(NamedTuple):
    """Heads on their way."""

    pending: comm.Pending
    rows: Tensor | None
    """Of every head, among those that arrive."""

    def wait(self) -> tuple[Tensor, ...]:
        heads = self.pending.wait()
        return ((heads if self.rows is None else heads.index_select(0, self.rows)).permute(1, 2, 0, 3),)


class LocalRows(NamedTuple):
    """Rows that need not travel."""

    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        return self.tensors


def _packed(tensors: tuple[Tensor, ...]) -> Tensor:
    """[s, b, h, sum d_i] of tensors [b, s, h, d_i]."""
    first, *others = [x.transpose(0, 1) for x in tensors]
    return torch.cat((first, *others), -1) if others else first


def _widths(tensors: tuple[Tensor, ...]) -> list[int]:
    return [x.shape[-1] for x in tensors]
