"""One attention call: its arguments, its plan, and this rank's place in it."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..config import TRUSTING, TreeConfig
from ..duals import goes_backward, has_tangents, only_backward
from ..kernels import Backend
from ..layout import Dispatched, Packed, Segment, Sharding, by_document, join, visible_rows
from ..log import say_once
from ..plan import Arrangement, Mask, PassPlan, Shape, Topology, TrainingPlan, plan_training
from ..spec import AttnSpec, MaskBounds
from .cell import Cell, SelectedKeys, wire_dtype
from .rows import TeamRows, VisibleRows
from .tuning import Stopwatch, tuned_plan

LIKENESS = operator.attrgetter("shape", "dtype", "device")  # what checks and plans depend on of a tensor


class Inputs(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    selected: Tensor | None

    @property
    def derivatives(self) -> dict[str, bool]:
        """What torch may ask for, as in `AttentionCall`."""
        tensors = self[:4]
        return dict(
            tangents=has_tangents(*tensors), transformed=not only_backward(), goes_backward=goes_backward(*tensors)
        )

    def key(self, ranks: comm.Ranks, *others: object) -> tuple | None:
        """By which the planned call is found again; None if every call is checked. others: all on which the checks and
        the plan depend, beside shapes, dtypes and devices of the inputs."""
        if ranks.config.check not in TRUSTING:
            return None
        q, k, v, sinks, _ = self
        tensors = LIKENESS(q), LIKENESS(k), LIKENESS(v), None if sinks is None else LIKENESS(sinks)
        return ranks, *others, *tensors, *self.derivatives.values()


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What the ranks of an attention call agree on, and what its plan is made of."""

    batch: int
    shape: Shape
    """Of the call's tensors on this rank, without tangents."""
    dtype: torch.dtype
    spec: AttnSpec
    queries: Sharding
    keys: Sharding
    """Equal to `queries` in self attention."""
    sinks: bool
    selected: int | None
    """Keys of each query, if it does not see all within the mask."""
    return_lse: bool
    return_max_logit: bool
    tangents: bool
    transformed: bool
    """Whether more than a backward can follow, so that results must not depend on trials."""
    goes_backward: bool
    config: TreeConfig
    topology: str
    """`Ranks.fingerprint`."""

    def agree(self, collective: comm.CollectiveCall, transport: str) -> comm.Agreement:
        """Packed documents and slices are new with every batch; so is the seed of dropout, with every call."""
        spec, layout, layout_kv = self.spec, self.queries.layout, self.keys.layout
        rows = dict(seq_len=self.queries.seq_len, seq_len_kv=self.keys.seq_len, layout=layout, layout_kv=layout_kv)
        packed = not isinstance(layout, (str, tuple)) and transport == "direct"
        others = {name: value for name, value in vars(self).items() if name not in ("shape", "spec", "queries", "keys")}
        facts = {"batch": self.batch, **({"documents": type(layout).__name__} if packed else rows)}
        return collective.agree(
            of_batch=rows | {"ranges": spec.ranges} if packed else None,
            changing={f"dropout_{x}": value for x, value in spec.dropout._asdict().items()} if spec.dropout else None,
            spec=replace(spec, dropout=None, ranges=None if packed else spec.ranges),
            **facts | self.shape._asdict() | others,
        )

    def planned_on(self, network: comm.Network, *, dual: bool, **others) -> TrainingPlan:
        """The plan of the call; dual: of the same with tangents. others: in place of the config's options."""
        config = self.config
        options = dict(
            batch=self.batch,
            seq_len=self.queries.seq_len,
            seq_len_kv=self.keys.seq_len,
            bytes_per_word=self.dtype.itemsize,
            causal=self.spec.causal,
            visible_fraction=self.visible_fraction,
            packed=isinstance(self.queries.layout, Packed),
            with_lse=self.return_lse or dual,
            dual=dual,
            mask=self.mask,
            topology=network.topology,
            placement=network.placement,
            schedule=config.schedule,
            ulysses_size=config.ulysses_size if self.selected is None else 1,
            grid=config.grid,
            grid_backward=config.grid_backward,
            head_chunks=config.head_chunks,
            memory_budget=config.memory_budget,
            deterministic=config.deterministic,
        )
        return plan_training(self.queries.world, self.shape, **options | others)

    @property
    def is_tuned(self) -> bool:
        """Whether the user leaves the plan to measurements, and the call is of a kind that may come again: slices and
        dispatched documents are most often new with every batch."""
        config, layout = self.config, self.queries.layout
        named = (config.grid, config.grid_backward, config.head_chunks, config.ulysses_size)
        free = config.schedule == "auto" and not any(named) and self.selected is None and not self.transformed
        lasting = self.spec.ranges is None and not (isinstance(layout, Dispatched) and len(layout.lengths) > 1)
        return config.tune and free and lasting and not config.deterministic and self.queries.world > 1

    @functools.cached_property
    def mask(self) -> Mask | None:
        """What the planner needs to know of the mask, where it may hide much of the keys. A window over documents that
        are all spread over all ranks is planned only if the schedule is named: they differ in every batch."""
        windowed = self.spec.left is not None and not isinstance(self.queries.layout, Packed)
        dispatched = isinstance(self.queries.layout, Dispatched)
        if windowed or dispatched or self.spec.ranges is not None or self.config.schedule == "cast":
            return Mask(self.spec.mask_bounds, self.queries, self.keys)
        return None

    @functools.cached_property
    def visible_fraction(self) -> float:
        """Of (query, key) pairs: those within one document and the window, before the causal mask; of documents rounded
        to a power of two so that cached plans are reused."""
        layout, spec, share = self.queries.layout, self.spec, 1.0
        if spec.ranges is not None:
            return sum(piece.pairs for piece in spec.ranges) / max(1, self.queries.seq_len * self.keys.seq_len)
        if isinstance(layout, (Packed, Dispatched)) and layout.pairs:
            share = 2.0 ** round(math.log2(layout.pairs / self.queries.seq_len**2))
        if spec.left is not None and self.keys.seq_len:
            seen = spec.left + 1 + (self.keys.seq_len if spec.right is None else spec.right)
            share = min(share, seen / self.keys.seq_len * (2 if spec.causal else 1))
        return share


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedAttention(AttentionCall):
    """An attention call that is checked, agreed on and planned, and this rank's place in it."""

    agreement: comm.Agreement
    ranks: comm.Ranks
    backend: Backend
    """The kernels of this call."""
    plan: TrainingPlan
    selected_keys: Tensor | None = None
    """int32 [b, s, m]: positions of the keys that this rank's queries see, if not all within the mask; -1: none."""
    cells: dict[tuple, Cell] = field(default_factory=dict)
    """By a pass's plan and backend."""

    @classmethod
    def again(cls, collective: comm.CollectiveCall, ranks: comm.Ranks, key: tuple | None) -> PlannedAttention | None:
        """The planned call of a call that is like an earlier one, which it repeats; None if there was none. key: of
        `Inputs.key`."""
        planned = ranks.state.planned.get(key)
        if planned is not None:
            collective.repeat(planned.agreement)
        return planned

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        agreement: comm.Agreement,
        ranks: comm.Ranks,
        backend: Backend,
        selected_keys: Tensor | None,
        rehearse: Callable[[PlannedAttention, Stopwatch], None],
        key: tuple | None = None,
    ) -> PlannedAttention:
        """Plan a call that the ranks have agreed on, unless one like it was planned before.

        rehearse: runs the passes of a planned call, which may be measured (tuning.py). key: by which `again` finds it.
        Collective at the group's first call of a kind.
        """
        key = key or (ranks, call, backend)
        if (planned := ranks.state.planned.get(key)) is not None:
            return planned
        topology, is_final = ranks.network.topology, True
        planned = cls(
            **vars(call), agreement=agreement, ranks=ranks, backend=backend, plan=None, selected_keys=selected_keys
        )
        if not call.is_tuned:
            plan = planned.plan_on(topology)
        else:
            rows = call.queries.seq_len, call.keys.seq_len
            sizes = call.shape, call.batch, call.dtype, call.return_lse, call.mask, call.visible_fraction
            kind = (*rows, call.spec.causal, call.config, call.topology, call.goes_backward, *sizes)

            def run(plan: TrainingPlan, watch: Stopwatch) -> None:
                rehearse(replace(planned, plan=plan), watch)

            plan, is_final = tuned_plan(ranks, kind, planned.plan_on, topology, run, backward=call.goes_backward)
        if call.queries.world > 1 and ranks.rank == 0:
            h, h_kv, d, _ = call.shape
            over = f"{call.queries.world} ranks ({h} heads, {h_kv} KV heads, head_dim {d})"
            network = "the network as measured" if topology.name == "measured" else topology.name
            say_once(f"attention over {over}, planned for {network}, one layer:\n{plan.reason}")
        planned = replace(planned, plan=plan)
        if is_final and call.spec.dropout is None and selected_keys is None and not call.return_max_logit:
            ranks.state.planned[key] = planned  # it depends on no tensor's values
        return planned

    def plan_on(self, topology: Topology, **others) -> TrainingPlan:
        """The call's plan if the network is this one. others: as of `planned_on`."""
        network = self.ranks.network._replace(topology=topology)
        integers = self.backend.adds_integers(self.queries, self.spec, self.dtype)
        return self.planned_on(network, dual=self.backend.dual, integers=integers, **others)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @functools.cached_property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which partial outputs and gradients are sent."""
        return wire_dtype(self.dtype, self.config)

    @functools.cached_property
    def local(self) -> tuple[Segment, ...]:
        """Of this rank's queries."""
        return self.queries.segments((self.rank,))

    @functools.cached_property
    def num_rows(self) -> int:
        """This rank's queries, without padding."""
        return sum(segment.length for segment in self.local)

    @functools.cached_property
    def for_duals(self) -> PlannedAttention:
        """The same call of dual tensors (duals.py)."""
        backend = self.backend.for_duals(self.dtype, max(self.shape.head_dim, self.shape.head_dim_v))
        for_duals = replace(self, backend=backend)
        return replace(for_duals, plan=for_duals.plan_on(self.ranks.network.topology))

    def cell(self, plan: PassPlan) -> Cell:
        """This rank's cell of a pass's arrangement (docs/design.md, section 2)."""
        if self.selected_keys is not None:  # what a cell has gathered of them goes with its pass
            return self._cell(plan)
        if (cell := self.cells.get((plan, self.backend))) is None:
            cell = self.cells[plan, self.backend] = self._cell(plan)
        return cell

    def _cell(self, plan: PassPlan) -> Cell:
        at = self.neighbours(plan)
        if plan.schedule == "cast":
            team = self._team("cast", plan, tuple((r,) for r in at.ring))
            local = at.ring.index(self.rank)
            rows = _rows_of_cast(at.ring_holders, local, self.queries, self.keys, self.spec.mask_bounds)
            keys = VisibleRows(team, self.keys.segments(at.holder), *rows)
        else:
            keys = TeamRows.of(self._team("keys", plan, at.key_team), self.keys, at.key_holders)
        gathers = plan.schedule in ("gather", "integers")
        team, holders = (at.key_team, at.key_holders) if gathers else (at.query_team, at.query_holders)
        queries = TeamRows.of(self._team("queries", plan, team), self.queries, holders)
        selected = None if self.selected_keys is None else SelectedKeys(self.selected_keys, queries)
        return Cell(queries=queries, keys=keys, backend=self.backend, wire=self.wire_dtype, selected=selected)

    def head_team(self, plan: PassPlan) -> comm.Team:
        """The ranks that exchange heads with this one."""
        return self._team("heads", plan, tuple((r,) for r in self.neighbours(plan).holder))

    def neighbours(self, plan: PassPlan) -> Neighbours:
        """Whom this rank works with in a pass."""
        return neighbours(self.ranks.network.placement.order, self.rank, plan.arrangement)

    def _team(self, name: str, plan: PassPlan, ranks: tuple[tuple[int, ...], ...]) -> comm.Team:
        return comm.Team(self.ranks, ranks, (name, *plan.arrangement))


class Neighbours(NamedTuple):
    """Whom a rank works with. A holder: whose shards a rank has once heads are exchanged."""

    holder: tuple[int, ...]
    """This rank's."""
    key_team: tuple[tuple[int, ...], ...]
    """The ranks of this rank's row of the grid, which gather keys together."""
    query_team: tuple[tuple[int, ...], ...]
    """The ranks of its column, which gather queries together."""
    ring: tuple[int, ...]
    """The ranks with the same heads, in the order of the ring."""
    key_holders: tuple[tuple[int, ...], ...]
    """Of the key team's ranks, in the order of what they gather."""
    query_holders: tuple[tuple[int, ...], ...]
    ring_holders: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=256)
def neighbours(order: tuple[int, ...], rank: int, arrangement: Arrangement) -> Neighbours:
    """Cached, as it is the same in every layer and takes milliseconds among hundreds of ranks."""
    x = order.index(rank)

    def ranks(positions) -> tuple[int, ...]:
        return tuple(order[y] for y in positions)

    keys, queries = arrangement.key_team_of(x), arrangement.query_team_of(x)
    ring = arrangement.places_of(x)
    lines = itertools.chain(*keys), itertools.chain(*queries), ring
    holders = (tuple(ranks(arrangement.holder_of(y)) for y in line) for line in lines)
    teams = tuple(map(ranks, keys)), tuple(map(ranks, queries)), ranks(ring)
    return Neighbours(ranks(arrangement.holder_of(x)), *teams, *holders)


@functools.lru_cache(maxsize=64)
def _rows_of_cast(
    holders: tuple[tuple[int, ...], ...],
    local: int,
    queries: Sharding,
    keys: Sharding,
    bounds: MaskBounds,
) -> tuple[tuple[tuple[Segment, ...], ...], tuple[int, ...], tuple[Segment, ...]]:
    """sent, lengths and arriving of `VisibleRows`, for the holder at index `local`."""
    of_queries, of_keys = ([by_document(x.segments(holder)) for holder in holders] for x in (queries, keys))
    sent, lengths, arrived = [()] * len(holders), [0] * len(holders), []
    for i in (i for i in range(len(holders)) if i != local):
        sent[i] = visible_rows(of_queries[i], of_keys[local], bounds)
        for segment in visible_rows(of_queries[local], of_keys[i], bounds):
            arrived.append(segment._replace(row=sum(lengths)))
            lengths[i] += segment.length
    return tuple(sent), tuple(lengths), join(arrived)
