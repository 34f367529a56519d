"""One validated attention call: the mathematics, the ranks, the layout, the plan, and this rank's cell of the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import comm
from ..config import AttnSpec, TreeConfig
from ..layout import Segment, Sharding
from ..plan import PassPlan, TrainingPlan


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Rank (i, j) of the grid: row i shares keys and values, column j shares queries.

    Segments say which rows of a gathered tensor hold which positions: of all its shares, of this rank's own alone (in
    its own tensor, not gathered), and of the others.
    """

    row: comm.Team
    column: comm.Team
    own_queries: tuple[Segment, ...]
    own_keys: tuple[Segment, ...]
    all_keys: tuple[Segment, ...]
    other_keys: tuple[Segment, ...]
    other_queries: tuple[Segment, ...]
    own_key_rows: slice
    own_query_rows: slice


@dataclass(frozen=True, kw_only=True)
class Job:
    """One validated attention call."""

    spec: AttnSpec
    group: object
    queries: Sharding
    keys: Sharding
    """The same as `queries` in self attention."""
    plan: TrainingPlan
    order: tuple[int, ...]
    """The ranks of `group` that take part, node by node: position -> group rank."""
    config: TreeConfig
    transport: str
    wire: torch.dtype

    @property
    def rank(self) -> int:
        return comm.group_rank(self.group)

    def cell(self, plan: PassPlan) -> Cell:
        """This rank's place on the grid of a pass, nested by node as docs/design.md, section 2, says."""
        (a, b), (a_in, b_in) = plan.grid, plan.inner
        a_out, b_out = a // a_in, b // b_in
        order, block = self.order, a_in * b_in
        node, place = divmod(order.index(self.rank), block)
        (i_out, j_out), (i_in, j_in) = divmod(node, b_out), divmod(place, b_in)

        def rank(i_out, i_in, j_out, j_in):
            return order[(i_out * b_out + j_out) * block + i_in * b_in + j_in]

        def team(name: str, ranks) -> comm.Team:
            options = (self.transport, self.config.timeout_s, (name, plan.grid, plan.inner))
            return comm.Team(self.group, tuple(map(tuple, ranks)), *options)

        row = team("row", ((rank(i_out, i_in, o, i) for o in range(b_out)) for i in range(b_in)))
        column = team("column", ((rank(o, i, j_out, j_in) for o in range(a_out)) for i in range(a_in)))
        key_at, query_at = row.order.index(self.rank), column.order.index(self.rank)
        return Cell(
            row=row,
            column=column,
            own_queries=self.queries.segments([self.rank]),
            own_keys=self.keys.segments([self.rank]),
            all_keys=self.keys.segments(row.order),
            other_keys=self.keys.segments(row.order, skip=key_at),
            other_queries=self.queries.segments(column.order, skip=query_at),
            own_key_rows=self.keys.rows_of(self.rank, at=key_at),
            own_query_rows=self.queries.rows_of(self.rank, at=query_at),
        )
