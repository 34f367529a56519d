"""One validated attention call: the mathematics, the ranks, the layout, the plan, and this rank's cell of the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import comm
from .config import AttnSpec, TreeConfig
from .plan import PassPlan, Placement, TrainingPlan
from .shard import Layout, Segment, gathered_segments, shard_lengths


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Rank (i, j) of the grid: row i shares keys and values, column j shares queries.

    Segments say which rows of a gathered tensor hold which positions: of all its shares, of this rank's own alone (in
    its own tensor, not gathered), and of the others.
    """

    row: comm.Team
    column: comm.Team
    own: tuple[Segment, ...]
    all_keys: tuple[Segment, ...]
    other_keys: tuple[Segment, ...]
    other_queries: tuple[Segment, ...]
    own_key_rows: slice
    own_query_rows: slice


@dataclass(frozen=True, kw_only=True)
class Job:
    """One validated call of `tree_attn_func`."""

    spec: AttnSpec
    group: object
    seq_len: int
    layout: Layout
    plan: TrainingPlan
    placement: Placement
    config: TreeConfig
    transport: str
    wire: torch.dtype

    @property
    def world(self) -> int:
        return comm.group_size(self.group)

    @property
    def rank(self) -> int:
        return comm.group_rank(self.group)

    @property
    def rows(self) -> int:
        """Rows of a share on the wire: the longest share's; shorter ones are padded."""
        return max(shard_lengths(self.seq_len, self.world, self.layout))

    def segments(self, ranks, skip: int | None = None) -> tuple[Segment, ...]:
        """Segments of these ranks' shares laid one after another, without the one at index `skip`."""
        return gathered_segments(ranks, self.seq_len, self.world, self.layout, self.rows, skip=skip)

    def cell(self, plan: PassPlan) -> Cell:
        """This rank's place on the grid of a pass, nested by node as docs/design.md, section 2, says."""
        (a, b), (a_in, b_in) = plan.grid, plan.inner
        a_out, b_out = a // a_in, b // b_in
        order, block = self.placement.order, a_in * b_in
        node, place = divmod(order.index(self.rank), block)
        (i_out, j_out), (i_in, j_in) = divmod(node, b_out), divmod(place, b_in)

        def rank(i_out, i_in, j_out, j_in):
            return order[(i_out * b_out + j_out) * block + i_in * b_in + j_in]

        def team(name: str, ranks) -> comm.Team:
            options = (self.transport, self.config.timeout_s, (name, plan.grid, plan.inner))
            return comm.Team(self.group, tuple(map(tuple, ranks)), *options)

        row = team("row", ((rank(i_out, i_in, o, i) for o in range(b_out)) for i in range(b_in)))
        column = team("column", ((rank(o, i, j_out, j_in) for o in range(a_out)) for i in range(a_in)))
        own = self.segments([self.rank])
        length = sum(s.length for s in own)
        key_at, query_at = row.order.index(self.rank), column.order.index(self.rank)
        return Cell(
            row=row,
            column=column,
            own=own,
            all_keys=self.segments(row.order),
            other_keys=self.segments(row.order, skip=key_at),
            other_queries=self.segments(column.order, skip=query_at),
            own_key_rows=slice(key_at * self.rows, key_at * self.rows + length),
            own_query_rows=slice(query_at * self.rows, query_at * self.rows + length),
        )
