"""One attention call: its arguments, its plan, and this rank's cell of the grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..config import AttnSpec, TreeConfig
from ..kernels import Backend
from ..layout import Packed, Segment, Sharding, join, visible_rows
from ..log import say_once
from ..plan import Mask, PassPlan, Shape, TrainingPlan, plan_training
from .topology import GroupTopology


class Cast(NamedTuple):
    """Which rows of keys travel between this rank and those with the same heads."""

    team: comm.Team
    sent: tuple[tuple[Segment, ...], ...]
    """By rank of the team: segments of this rank's keys that its queries see; none for this rank itself."""
    lengths: list[int]
    """By rank of the team: how many rows it sends here."""
    arrived: tuple[Segment, ...]
    """Segments of the rows that arrive, one rank's after another's."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Rank (i, j) of the grid: row i gathers keys and values, column j gathers queries.

    Segments say which rows of a tensor hold which positions. "all" and "other" describe a gathered tensor, with and
    without this rank's own rows; "own" describes this rank's own tensor.
    """

    heads: comm.Team | None
    """The ranks that exchange heads; None if each rank keeps all of its own."""
    row: comm.Team
    column: comm.Team
    own_queries: tuple[Segment, ...]
    own_keys: tuple[Segment, ...]
    all_keys: tuple[Segment, ...]
    other_keys: tuple[Segment, ...]
    other_queries: tuple[Segment, ...]
    own_key_rows: slice
    own_query_rows: slice
    key_rows: int
    """Rows in which this rank's keys travel along the row."""
    query_rows: int
    """Rows in which its queries travel down the column."""
    cast: Cast | None
    """In the schedule "cast": which keys go to whom."""


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
        self, q: Tensor, k: Tensor, v: Tensor, net: GroupTopology, backend: Backend, with_lse: bool
    ) -> AttnCall:
        """Plan the call. with_lse: whether the caller gets lse, which would have to be exchanged like heads."""
        config, world = self.config, self.queries.world
        shape = Shape(q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        plan = plan_training(
            world,
            shape,
            batch=q.shape[0],
            seq_len=self.queries.seq_len,
            seq_len_kv=self.keys.seq_len,
            bytes_per_word=q.element_size(),
            causal=self.spec.causal,
            visible=_visible(self),
            mask=self._mask(),
            topology=net.topology,
            placement=net.placement,
            schedule=config.schedule,
            ulysses_size=1 if config.ulysses_size is None and with_lse else config.ulysses_size,
            grid=config.grid,
            grid_backward=config.grid_backward,
            head_groups=config.head_groups,
            memory_budget=config.memory_budget,
        )
        if world > 1 and comm.group_rank(self.group) == 0:
            h, h_kv, d, _ = shape
            say_once(f"attention over {world} ranks ({h} heads, {h_kv} KV heads, head_dim {d}): {plan.reason}")
        return AttnCall(
            **vars(self),
            plan=plan,
            shape=shape,
            order=net.placement.order,
            transport=net.transport,
            backend=backend,
            wire_dtype=torch.promote_types(q.dtype, torch.float32) if config.comm_dtype == "fp32" else q.dtype,
        )

    def _mask(self) -> Mask | None:
        """What the planner needs to know of the mask. A window over packed documents, which differ in every batch, is
        planned only if the schedule is named."""
        windowed = self.spec.left is not None and not isinstance(self.queries.layout, Packed)
        if windowed or self.config.schedule == "cast":
            return Mask(self.spec.left, self.spec.right, self.queries, self.keys)
        return None


@dataclass(frozen=True, kw_only=True)
class AttnCall(AttnArgs):
    """A checked and planned attention call."""

    plan: TrainingPlan
    shape: Shape
    """Of the call's tensors on this rank."""
    order: tuple[int, ...]
    """The ranks of `group`, node by node: position -> group rank."""
    transport: str
    backend: Backend
    """The kernels of this call."""
    wire_dtype: torch.dtype
    """The dtype in which partial outputs and gradients are sent."""

    @property
    def rank(self) -> int:
        return comm.group_rank(self.group)

    def cell(self, plan: PassPlan) -> Cell:
        """This rank's cell of a pass's arrangement (docs/design.md, section 2)."""
        x, arrangement = self.order.index(self.rank), plan.arrangement
        rows, columns = arrangement.row_of(x), arrangement.column_of(x)
        row, column = self._team("row", plan, rows), self._team("column", plan, columns)
        key_at, query_at = row.order.index(self.rank), column.order.index(self.rank)
        own, keys, queries = (self._holders(plan, positions) for positions in (((x,),), rows, columns))
        return Cell(
            heads=self._team("heads", plan, [(y,) for y in arrangement.holder_of(x)]) if arrangement.u > 1 else None,
            row=row,
            column=column,
            own_queries=self.queries.segments(*own),
            own_keys=self.keys.segments(*own),
            all_keys=self.keys.segments(*keys),
            other_keys=self.keys.segments(*keys, skip=key_at),
            other_queries=self.queries.segments(*queries, skip=query_at),
            own_key_rows=self.keys.rows_of(own[0], at=key_at),
            own_query_rows=self.queries.rows_of(own[0], at=query_at),
            key_rows=arrangement.u * self.keys.rows,
            query_rows=arrangement.u * self.queries.rows,
            cast=self._cast(plan) if plan.schedule == "cast" else None,
        )

    def ring(self, plan: PassPlan) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """The ranks of this rank's ring in their order, and the holder that each of them is."""
        places = plan.arrangement.places_of(self.order.index(self.rank))
        return tuple(self.order[x] for x in places), self._holders(plan, [places])

    def _cast(self, plan: PassPlan) -> Cast:
        order, holders = self.ring(plan)
        own, spec = order.index(self.rank), self.spec
        queries, keys = ([x.segments(holder) for holder in holders] for x in (self.queries, self.keys))
        sent, lengths, arrived = [()] * len(order), [0] * len(order), []
        for i in (i for i in range(len(order)) if i != own):
            sent[i] = visible_rows(queries[i], keys[own], spec.left, spec.right)
            for segment in visible_rows(queries[own], keys[i], spec.left, spec.right):
                arrived.append(segment._replace(row=sum(lengths)))
                lengths[i] += segment.length
        places = plan.arrangement.places_of(self.order.index(self.rank))
        return Cast(self._team("cast", plan, [(x,) for x in places]), tuple(sent), lengths, join(arrived))

    def _team(self, name: str, plan: PassPlan, positions) -> comm.Team:
        ranks = tuple(tuple(self.order[x] for x in place) for place in positions)
        options = (self.transport, self.config.timeout_s, (name, *plan.arrangement))
        return comm.Team(self.group, ranks, *options)

    def _holders(self, plan: PassPlan, positions) -> list[tuple[int, ...]]:
        """Whose shards the ranks at these positions have once heads are exchanged."""
        holders = (plan.arrangement.holder_of(x) for place in positions for x in place)
        return [tuple(self.order[y] for y in holder) for holder in holders]


def _visible(args: AttnArgs) -> float:
    """Fraction of (query, key) pairs within one document and the window, before the causal mask; of documents rounded
    to a power of two so that cached plans are reused."""
    layout, spec, share = args.queries.layout, args.spec, 1.0
    if isinstance(layout, Packed) and sum(layout.padded):
        inside = sum(n * n for n in layout.lengths) / sum(layout.padded) ** 2
        share = 2.0 ** round(math.log2(inside)) if inside else 1.0
    if spec.left is not None and args.keys.seq_len:
        seen = spec.left + 1 + (args.keys.seq_len if spec.right is None else spec.right)
        share = min(share, seen / args.keys.seq_len * (2 if spec.causal else 1))
    return share
