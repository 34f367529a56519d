"""One attention call: its arguments, its plan, and this rank's place in it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..config import AttnSpec, MaskBounds, TreeConfig
from ..kernels import Backend
from ..layout import Dispatched, Packed, Segment, Sharding, by_document, join, visible_rows
from ..log import say_once
from ..plan import Arrangement, Mask, PassPlan, Shape, TrainingPlan, plan_training
from .cell import Cell, Selected, wire_dtype
from .rows import TeamRows, VisibleRows
from .tuning import Stopwatch, tuned_plan


@dataclass(frozen=True, kw_only=True)
class AttnArgs:
    """A checked attention call, before it is planned."""

    spec: AttnSpec
    ranks: comm.Ranks
    queries: Sharding
    keys: Sharding
    """Equal to `queries` in self attention."""
    selected: Tensor | None = None
    """int32 [b, s, m]: positions of the keys that this rank's queries see, if not all within the mask; -1: none."""

    @property
    def config(self) -> TreeConfig:
        return self.ranks.config

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def planned(
        self,
        shape: Shape,
        batch: int,
        dtype: torch.dtype,
        backend: Backend,
        with_lse: bool,
        *,
        again: bool = False,
        rehearse: Callable[[AttnCall, Stopwatch], None] | None = None,
    ) -> AttnCall:
        """Plan the call of tensors of this shape, and of the same with tangents if backend.dual. with_lse: as in
        `plan_training`. rehearse: runs the passes of a call, whose plan may be measured (tuning.py); again: it goes
        backward. Collective at the group's first call."""
        sizes = (shape, batch, dtype, with_lse, self._mask(), _visible_fraction(self))
        args = {name: getattr(self, name) for name in _ARGS}
        made = functools.partial(AttnCall, **args, shape=shape, batch=batch, dtype=dtype, backend=backend)
        plan_on, topology = self._plan_on(backend.dual, *sizes), self.ranks.network.topology
        if rehearse is None or not self._is_tuned():
            plan = plan_on(topology=topology)
        else:
            rows = self.queries.seq_len, self.keys.seq_len
            kind = (*rows, self.spec.causal, self.config, self.ranks.fingerprint, again, *sizes)

            def run(plan: TrainingPlan, watch: Stopwatch) -> None:
                rehearse(made(plan=plan), watch)

            plan = tuned_plan(self.ranks, kind, plan_on, topology, run, again=again)
        if not backend.dual:
            self._say(shape, plan)
        return made(plan=plan)

    def _plan_on(self, dual, shape, batch, dtype, with_lse, mask, fraction) -> Callable[..., TrainingPlan]:
        """`plan_training` of the call; of a topology. It must not hold the group."""
        config = self.config
        return functools.partial(
            plan_training,
            self.queries.world,
            shape,
            batch=batch,
            seq_len=self.queries.seq_len,
            seq_len_kv=self.keys.seq_len,
            bytes_per_word=dtype.itemsize,
            causal=self.spec.causal,
            visible_fraction=fraction,
            with_lse=with_lse,
            dual=dual,
            mask=mask,
            placement=self.ranks.network.placement,
            schedule=config.schedule,
            ulysses_size=config.ulysses_size if self.selected is None else 1,
            grid=config.grid,
            grid_backward=config.grid_backward,
            head_chunks=config.head_chunks,
            memory_budget=config.memory_budget,
        )

    def _say(self, shape: Shape, plan: TrainingPlan) -> None:
        if self.queries.world > 1 and self.rank == 0:
            h, h_kv, d, _ = shape
            ranks = f"{self.queries.world} ranks ({h} heads, {h_kv} KV heads, head_dim {d})"
            say_once(f"attention over {ranks}: {plan.reason}")

    def _is_tuned(self) -> bool:
        """Whether the user leaves the plan to measurements, and the call is of a kind that may come again: slices and
        dispatched documents are most often new with every batch."""
        config, layout = self.config, self.queries.layout
        named = (config.grid, config.grid_backward, config.head_chunks, config.ulysses_size)
        free = config.schedule == "auto" and not any(named) and self.selected is None
        lasting = self.spec.ranges is None and not (isinstance(layout, Dispatched) and len(layout.lengths) > 1)
        return config.tune and free and lasting and not config.deterministic and self.queries.world > 1

    def _mask(self) -> Mask | None:
        """What the planner needs to know of the mask, where it may hide much of the keys. A window over documents that
        are all spread over all ranks is planned only if the schedule is named: they differ in every batch."""
        windowed = self.spec.left is not None and not isinstance(self.queries.layout, Packed)
        dispatched = isinstance(self.queries.layout, Dispatched)
        if windowed or dispatched or self.spec.ranges is not None or self.config.schedule == "cast":
            return Mask(self.spec.mask_bounds, self.queries, self.keys)
        return None


_ARGS = tuple(field.name for field in dataclasses.fields(AttnArgs))


@dataclass(frozen=True, kw_only=True)
class AttnCall(AttnArgs):
    """A checked and planned attention call."""

    plan: TrainingPlan
    shape: Shape
    """Of the call's tensors on this rank, without tangents."""
    batch: int
    dtype: torch.dtype
    backend: Backend
    """The kernels of this call."""

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which partial outputs and gradients are sent."""
        return wire_dtype(self.dtype, self.config)

    @functools.cached_property
    def of_duals(self) -> AttnCall:
        """The same call of dual tensors (duals.py)."""
        backend = self.backend.of_duals(self.dtype, max(self.shape.head_dim, self.shape.head_dim_v))
        return self.planned(self.shape, self.batch, self.dtype, backend, with_lse=True)

    def cell(self, plan: PassPlan) -> Cell:
        """This rank's cell of a pass's arrangement (docs/design.md, section 2)."""
        at = self.neighbours(plan)
        if plan.schedule == "cast":
            team = self._team("cast", plan, tuple((r,) for r in at.ring))
            local = at.ring.index(self.rank)
            rows = _rows_of_cast(at.ring_holders, local, self.queries, self.keys, self.spec.mask_bounds)
            keys = VisibleRows(team, self.keys.segments(at.holder), *rows)
        else:
            keys = TeamRows.of(self._team("keys", plan, at.key_team), self.keys, at.key_holders)
        queries = TeamRows.of(self._team("queries", plan, at.query_team), self.queries, at.query_holders)
        selected = None if self.selected is None else Selected(self.selected, queries)
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


def _visible_fraction(args: AttnArgs) -> float:
    """Fraction of (query, key) pairs within one document and the window, before the causal mask; of documents rounded
    to a power of two so that cached plans are reused."""
    layout, spec, share = args.queries.layout, args.spec, 1.0
    if spec.ranges is not None:
        return sum(piece.pairs for piece in spec.ranges) / max(1, args.queries.seq_len * args.keys.seq_len)
    if isinstance(layout, (Packed, Dispatched)) and layout.pairs:
        share = 2.0 ** round(math.log2(layout.pairs / args.queries.seq_len**2))
    if spec.left is not None and args.keys.seq_len:
        seen = spec.left + 1 + (args.keys.seq_len if spec.right is None else spec.right)
        share = min(share, seen / args.keys.seq_len * (2 if spec.causal else 1))
    return share
