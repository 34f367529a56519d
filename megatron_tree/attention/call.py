"""One attention call: its arguments, its plan, and this rank's cell of the grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import comm
from ..config import AttnSpec, TreeConfig
from ..kernels import Backend
from ..layout import Layout, Packed, Segment, Sharding
from ..log import say_once
from ..plan import PassPlan, Shape, TrainingPlan, plan_training
from .topology import GroupTopology


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Rank (i, j) of the grid: row i gathers keys and values, column j gathers queries.

    Segments say which rows of a tensor hold which positions. "all" and "other" describe a gathered tensor, with and
    without this rank's own shard; "own" describes this rank's own tensor.
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
class AttnArgs:
    """A checked attention call, before it is planned."""

    spec: AttnSpec
    group: object
    queries: Sharding
    keys: Sharding
    """Equal to `queries` in self attention."""
    config: TreeConfig

    def planned(
        self, q: Tensor, k: Tensor, v: Tensor, net: GroupTopology, backend: Backend, members: tuple[int, ...]
    ) -> AttnCall:
        """Plan the call for `members`, some ranks of the group. All teams of the group use the first team's plan."""
        config, world, u = self.config, len(members), self.queries.fused
        shape = Shape(q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        placement = net.placement_of(members)
        plan = plan_training(
            world,
            shape,
            batch=q.shape[0],
            seq_len=self.queries.seq_len,
            seq_len_kv=self.keys.seq_len,
            bytes_per_word=q.element_size(),
            causal=self.spec.causal,
            visible=_visible(self.queries.layout),
            topology=net.topology,
            placement=placement if u == 1 else net.placement_of(tuple(range(0, u * world, u))),
            schedule=config.schedule,
            grid=config.grid,
            grid_backward=config.grid_backward,
            head_groups=config.head_groups,
            memory_budget=config.memory_budget,
        )
        if world > 1 and comm.group_rank(self.group) == 0:
            h, h_kv, d, _ = shape
            teams = "" if u == 1 else f", in each of {u} Ulysses ranks"
            say_once(f"attention over {world} ranks ({h} heads, {h_kv} KV heads, head_dim {d}{teams}): {plan.reason}")
        return AttnCall(
            **vars(self),
            plan=plan,
            order=tuple(members[i] for i in placement.order),
            transport=net.transport,
            backend=backend,
            wire_dtype=torch.promote_types(q.dtype, torch.float32) if config.comm_dtype == "fp32" else q.dtype,
        )


@dataclass(frozen=True, kw_only=True)
class AttnCall(AttnArgs):
    """A checked and planned attention call."""

    plan: TrainingPlan
    order: tuple[int, ...]
    """The participating ranks of `group`, node by node: position -> group rank."""
    transport: str
    backend: Backend
    """The kernels of this call."""
    wire_dtype: torch.dtype
    """The dtype in which partial outputs and gradients are sent."""

    @property
    def rank(self) -> int:
        return comm.group_rank(self.group)

    def cell(self, plan: PassPlan) -> Cell:
        """This rank's cell of the nested grid of a pass (docs/design.md, section 2)."""
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


def _visible(layout: Layout) -> float:
    """Fraction of (query, key) pairs within one document, rounded to a power of two so that cached plans are reused."""
    if not isinstance(layout, Packed) or not sum(layout.padded):
        return 1.0
    share = sum(n * n for n in layout.lengths) / sum(layout.padded) ** 2
    return 2.0 ** round(math.log2(share)) if share else 1.0
