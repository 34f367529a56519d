"""Chooses the schedule of a call: pure functions of sizes and topology, no tensors, no communication.

Every candidate gets a predicted cost (`training.py`, `decode.py`, with the model in `cost.py`), and the fastest wins.
In training u ranks exchange heads, and a grid a x b or a ring joins the others. Every u, every way to place it on
nodes, and every grid and nesting is a candidate, forward and backward on their own; u is the same for both, since the
backward uses what the forward has exchanged. Both passes count together. `choice.py` decides between candidates that
are about equally fast. All ranks compute the same plan from the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..config import DECODE_SCHEDULES, check_choice
from ..units import format_bytes, format_seconds
from .choice import MAX_HEAD_CHUNKS, Candidate, choose, choose_head_chunks, choose_pair
from .cost import PlacedTopology, placed_topology
from .decode import StepSizes, reductions
from .plans import (
    Arrangement,
    CallSizes,
    Cost,
    DecodePlan,
    HeadSplit,
    PassPlan,
    Shape,
    TrainingPlan,
    check_grid,
    grids,
    head_splits,
    inner_grids,
)
from .topology import Placement, Topology
from .training import Mask, cast_plan, grid_plan, ring_plan


@lru_cache(maxsize=1024)
def plan_training(
    world: int,
    shape: Shape,
    *,
    batch: int,
    seq_len: int,
    seq_len_kv: int | None = None,
    bytes_per_word: int,
    causal: bool = True,
    visible_fraction: float = 1.0,
    packed: bool = False,
    with_lse: bool = False,
    dual: bool = False,
    mask: Mask | None = None,
    topology: Topology,
    placement: Placement,
    schedule: str = "auto",
    ulysses_size: int | None = None,
    grid: tuple[int, int] | None = None,
    grid_backward: tuple[int, int] | None = None,
    head_chunks: int | None = None,
    memory_budget: int | None = None,
    deterministic: bool | str = False,
    integers: bool = False,
) -> TrainingPlan:
    """The plan of one attention call and its gradient over `world` ranks; the options are those of `TreeConfig`.

    Args:
        shape: heads and their sizes on one rank.
        batch, seq_len, seq_len_kv: of the call, with all tokens of the sequence; seq_len_kv (default seq_len): of cross
            attention's keys.
        visible_fraction: of the (query, key) pairs within one document and the window, before the causal mask.
        packed: whether there are documents, each of which is cut over all ranks.
        with_lse: the caller gets lse, which would have to be exchanged like heads.
        dual: of dual tensors (duals.py): the forward has tangents and the backward is a second-order pass.
        mask: who sees which keys; with it the cast is a candidate, too. The schedule "cast" needs it.
        bytes_per_word: of the inputs' dtype; messages use the same dtype.
        topology, placement: the machine, and the group's ranks in it.
        integers: whether deterministic="ranks" may add up gradients of keys over ranks (`Backend.adds_integers`).
        ulysses_size: None: any that divides the ranks, but 1 with a pinned grid, the ring, or `with_lse`.

    Raises: ValueError for a grid or head chunks that don't fit the call, and if no schedule fits the budget.
    """
    placed = _placed(world, topology, placement)
    if ulysses_size is None and (schedule == "ring" or grid or grid_backward or with_lse):
        ulysses_size = 1
    sizes = CallSizes.of(
        world,
        shape,
        batch=batch,
        seq_len=seq_len,
        seq_len_kv=seq_len_kv,
        bytes_per_word=bytes_per_word,
        causal=causal,
        visible_fraction=visible_fraction,
        packed=packed,
        with_lse=with_lse,
        dual=dual,
    )
    gathers = deterministic == "ranks"
    weigh = _Weigher(placed, shape, sizes, (grid, grid_backward or grid), head_chunks, memory_budget, mask, gathers)
    splits = weigh.head_placements(ulysses_size)
    if gathers:
        grids_of, rings_of = [weigh.gather(heads, integers) for heads in splits], []
    else:
        grids_of = [weigh.grids(heads, schedule) for heads in splits]
        rings_of = [weigh.rings(heads, alone=schedule == "ring" or world == 1) for heads in splits]
    options = rings_of if schedule == "ring" else grids_of
    if schedule == "auto" and not (grid or grid_backward or head_chunks):
        mixed = [[[*of_pass, *ring] for of_pass, ring in zip(*both)] for both in zip(grids_of, rings_of) if both[1][0]]
        options = [*grids_of, *mixed]
    pinned = grid or grid_backward or schedule in ("ring", "cast") or (ulysses_size or 1) > 1
    tables = tuple(_by_time([c for passes in (*grids_of, *rings_of) for c in passes[n]]) for n in (0, 1))
    names = ("forward with tangents", "second-order pass") if dual else ("forward", "backward")
    chosen = choose_pair(options, placed, memory_budget, names)
    return _training_plan(chosen, names, tables, placed, bool(pinned))


def _training_plan(chosen: tuple[PassPlan, PassPlan], names, tables, placed: PlacedTopology, pinned: bool):
    """The plan, with its reason. tables: all candidates for the forward and for the backward, fastest first."""
    asked = " (as asked for)" if pinned else ""
    lines = [f"{name} on {best}{asked}\n{name}: {_summary(best.cost, placed)}" for name, best in zip(names, chosen)]
    return TrainingPlan(forward=chosen[0], backward=chosen[1], reason="\n".join(lines), candidates=tables)


@dataclass(frozen=True)
class _Weigher:
    """The candidates of a training call, with their costs."""

    placed: PlacedTopology
    shape: Shape
    sizes: CallSizes
    pinned: tuple[tuple[int, int] | None, tuple[int, int] | None]
    head_chunks: int | None
    budget: int | None
    mask: Mask | None
    whole_heads: bool
    """Whether an exchange of heads leaves all query heads of a KV head on one rank."""

    def head_placements(self, ulysses_size: int | None) -> list[tuple[int, int]]:
        """Every (across nodes, inside a node) of ranks that may exchange heads, the smallest u first."""
        placed, chunks = self.placed, self.head_chunks or 1
        if ulysses_size is None:
            divisors = (n for n in range(1, min(placed.world, self.shape.num_heads) + 1) if placed.world % n == 0)
            sizes = [u for u in divisors if u == 1 or self._split(u).n % chunks == 0]
        else:
            sizes = [ulysses_size]
        return [heads for u in sizes for heads in head_splits(u, placed.nodes, placed.block)]

    def grids(self, heads: tuple[int, int], schedule: str) -> list[list[PassPlan]]:
        """Every grid and nesting, and the cast, for the forward and for the backward, each with the best number of head
        chunks."""
        u, by_pass = heads[0] * heads[1], []
        split, cells, block = self._split(u), self.placed.world // u, self.placed.block
        chunks = self._head_chunks(split)
        for backward, (name, pinned) in enumerate(zip(("grid", "grid_backward"), self.pinned)):
            if pinned is not None:
                check_grid(pinned, cells, name, u)
            casts = self.mask is not None and cells > 1 and pinned is None and schedule != "grid"
            arrangements = (
                Arrangement(heads, grid, inner, block)
                for grid in ([pinned] if pinned else grids(cells))
                for inner in inner_grids(grid, block // heads[1])
                if not (casts and schedule == "cast")
            )
            call = self.placed, self.sizes
            weighed = [[grid_plan(*call, a, split, n, bool(backward)) for n in chunks] for a in arrangements]
            if casts:
                row = Arrangement(heads, (1, cells), (1, block // heads[1]), block)
                weighed.append([cast_plan(*call, row, split, n, bool(backward), self.mask) for n in chunks])
            by_pass.append([choose_head_chunks(variants, self.budget) for variants in weighed])
        return by_pass

    def gather(self, heads: tuple[int, int], integers: bool) -> list[list[PassPlan]]:
        """The gather of all rows by the ranks with the same heads, forward and backward; backward also that of keys
        alone, if their gradients may be added up as integers."""
        u = heads[0] * heads[1]
        split, cells, block = self._split(u), self.placed.world // u, self.placed.block
        for name, pinned in zip(("grid", "grid_backward"), self.pinned):
            if pinned is not None:
                check_grid(pinned, cells, name, u)
        call = self.placed, self.sizes, Arrangement(heads, (1, cells), (1, block // heads[1]), block), split
        names, chunks = ("gather", "integers") if integers and cells > 1 else ("gather",), self._head_chunks(split)

        def weighed(name: str, backward: bool) -> PassPlan:
            plans = [grid_plan(*call, n, backward, local_first=False, schedule=name) for n in chunks]
            return choose_head_chunks(plans, self.budget)

        return [[weighed("gather", False)], [weighed(name, True) for name in names]]

    def rings(self, heads: tuple[int, int], *, alone: bool) -> list[list[PassPlan]]:
        """The ring of the ranks with the same heads, forward and backward. alone: also a ring of one rank, which is
        the grid 1x1."""
        n, inner = self.placed.world // (heads[0] * heads[1]), self.placed.block // heads[1]
        if n == 1 and not alone:
            return [[], []]
        arrangement, split = Arrangement(heads, (1, n), (1, inner), self.placed.block), self._split(heads[0] * heads[1])
        return [[ring_plan(self.placed, self.sizes, arrangement, split, backward)] for backward in (False, True)]

    def _head_chunks(self, split: HeadSplit) -> list[int]:
        """Into how many chunks KV heads may be cut."""
        if self.head_chunks:
            divisors = [n for n in range(1, split.n + 1) if split.n % n == 0]
            if self.head_chunks not in divisors:
                raise ValueError(
                    f"head_chunks={self.head_chunks} must divide num_heads_kv={split.n}: choose one of {divisors}"
                )
            return [self.head_chunks]
        return [n for n in range(1, MAX_HEAD_CHUNKS + 1) if split.n % n == 0] if self.placed.world > 1 else [1]

    def _split(self, u: int) -> HeadSplit:
        return HeadSplit.of(self.shape.num_heads, self.shape.num_heads_kv, u, whole=self.whole_heads)


@lru_cache(maxsize=4096)
def plan_decode(
    world: int,
    *,
    rows: int,
    head_dim_v: int,
    kv_bytes: int | None,
    topology: Topology,
    placement: Placement,
    schedule: str = "auto",
    memory_budget: int | None = None,
    deterministic: bool = False,
    local_heads: bool = False,
) -> DecodePlan:
    """The plan of one decode step over `world` ranks. "auto" never takes the ring, which moves the cache itself.

    Args:
        rows: b * s_q * h, the rows of a partial state.
        head_dim_v: d_v; a state is rows x (d_v + 1) fp32.
        kv_bytes: bytes of one rank's shard of the cache. None: unknown; predicted times then exclude the local
            attention, and the ring, which sends the cache, is considered only if it is requested.
        topology, placement: the machine, and the group's ranks in it.
        schedule: "auto", or a schedule's name; for "two_level" the exchange across nodes is still chosen.
        memory_budget: limit in bytes of a rank's communication buffers; None: no limit.
        deterministic: "auto" excludes "allreduce", whose summation order is up to the backend.
        local_heads: each rank needs the results of its heads only, so "scatter" ends after its first half.

    Raises: ValueError for an unknown schedule, and if no schedule fits the budget.
    """
    placed = _placed(world, topology, placement)
    check_choice("schedule", schedule, DECODE_SCHEDULES)
    weighed = reductions(placed, StepSizes(rows, (head_dim_v + 1) * 4, kv_bytes or 0), local_heads)
    if kv_bytes is None and schedule != "ring":
        weighed = [r for r in weighed if r.schedule != "ring"]
    if placed.block == 1 and schedule != "two_level":  # there it is an all-gather
        weighed = [r for r in weighed if r.schedule != "two_level"]
    never = ("ring", "allreduce") if deterministic else ("ring",)
    allowed = [r for r in weighed if (r.schedule not in never if schedule == "auto" else r.schedule == schedule)]
    best = choose(allowed, placed, memory_budget, "decode step")
    table = _by_time(weighed)
    asked = "" if schedule == "auto" else " (as asked for)"
    reason = f"{best}{asked}: {_summary(best.cost, placed)}"
    return DecodePlan(**vars(best), reason=reason, candidates=table)


def _placed(world: int, topology: Topology, placement: Placement) -> PlacedTopology:
    if world != len(placement.order):
        raise ValueError(f"world={world} but placement holds {len(placement.order)} ranks: place() the group itself")
    return placed_topology(topology, placement)


def _by_time(weighed: list[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(weighed, key=lambda c: c.cost.time_s))


def _summary(cost: Cost, placed: PlacedTopology) -> str:
    over = (
        f", {format_bytes(cost.bytes_per_level[placed.top])} of them over {placed.topology.levels[placed.top].name}"
        if placed.top
        else ""
    )
    return f"{format_seconds(cost.time_s)} predicted, {format_bytes(cost.bytes)} sent by a rank{over}"
