"""Chooses the schedule of a call: pure functions of sizes and topology, no tensors, no communication.

Every candidate gets a predicted cost (`training.py` and `decode.py`, using the model in `cost.py`); the fastest wins.
All ranks compute the same plan from the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from ..config import DECODE_SCHEDULES, SCHEDULES, check_choice
from ..units import format_bytes, format_seconds
from .cost import PlacedTopology, placed_topology
from .decode import StepSizes, reductions
from .plans import (
    Cost,
    DecodePlan,
    PassPlan,
    Reduction,
    Shape,
    TrainingPlan,
    check_grid,
    grids,
    inner_grids,
)
from .topology import Placement, Topology
from .training import CallSizes, backward_words, forward_words, grid_plan, ring_plan

__all__ = [
    "Cost",
    "DecodePlan",
    "PassPlan",
    "Reduction",
    "Shape",
    "TrainingPlan",
    "backward_words",
    "check_grid",
    "forward_words",
    "grids",
    "plan_decode",
    "plan_training",
]

BASELINES = ("allreduce", "ring")
TIE = 1.05  # schedules whose predicted times differ by less count as equally fast
SAME = 1.01  # the same for the numbers of head groups of one grid
CLEARLY = 0.9  # a baseline is chosen only below this fraction of the best other time
MAX_HEAD_GROUPS = 16

Candidate = TypeVar("Candidate", PassPlan, Reduction)


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
    visible: float = 1.0,
    topology: Topology,
    placement: Placement,
    schedule: str = "auto",
    grid: tuple[int, int] | None = None,
    grid_backward: tuple[int, int] | None = None,
    head_groups: int | None = None,
    memory_budget: int | None = None,
) -> TrainingPlan:
    """The plan of one attention call and its gradient over `world` ranks.

    The grid and nesting with the lowest predicted time wins. Among those within 5 % of it, the one wins that sends the
    fewest bytes over the outermost level, then the one that sends the fewest bytes overall. Among the numbers of head
    groups within 1 % of a grid's best time, the one with the smallest buffers is taken. The ring is taken if it is
    requested, if its predicted time is below 0.9 of the best grid's, or if nothing else fits the memory budget.

    Args:
        shape: heads and their sizes on one rank.
        batch, seq_len: of the call; seq_len is that of the whole sequence.
        seq_len_kv: of cross attention's keys; default seq_len.
        visible: fraction of the (query, key) pairs that lie within one document, before the causal mask.
        bytes_per_word: of the inputs' dtype; messages use the same dtype.
        topology, placement: the machine, and the group's ranks in it.
        schedule: "auto", "grid" or "ring".
        grid, grid_backward: pinned grids (a, b); `grid` also applies to the backward unless `grid_backward` is given.
        head_groups: pinned number of head groups; it must divide num_heads_kv.
        memory_budget: limit in bytes of a rank's communication buffers; None: no limit.

    Raises: ValueError for contradictory options, and if no schedule fits the budget.
    """
    placed = _placed(world, topology, placement)
    check_choice("schedule", schedule, SCHEDULES)
    if schedule == "ring" and (grid or grid_backward or head_groups):
        raise ValueError("grid, grid_backward and head_groups have no meaning with schedule='ring': leave them out")
    if head_groups is not None and (head_groups < 1 or shape.num_heads_kv % head_groups):
        divisors = [n for n in range(1, shape.num_heads_kv + 1) if shape.num_heads_kv % n == 0]
        raise ValueError(
            f"head_groups={head_groups} must divide num_heads_kv={shape.num_heads_kv}: choose one of {divisors}"
        )
    for name, pinned in (("grid", grid), ("grid_backward", grid_backward)):
        if pinned is not None:
            check_grid(pinned, world, name)
    sizes = CallSizes.of(
        world,
        shape,
        batch=batch,
        seq_len=seq_len,
        seq_len_kv=seq_len_kv,
        bytes_per_word=bytes_per_word,
        causal=causal,
        visible=visible,
    )
    groups = [n for n in range(1, MAX_HEAD_GROUPS + 1) if shape.num_heads_kv % n == 0] if world > 1 else [1]
    groups = [head_groups] if head_groups else groups
    chosen, tables, reasons = [], [], []
    for backward, pinned in ((False, grid), (True, grid_backward or grid)):
        weighed = [
            _head_groups([grid_plan(placed, sizes, cells, inner, n, backward) for n in groups], memory_budget)
            for cells in ([pinned] if pinned else grids(world))
            for inner in inner_grids(cells, placed.block)
        ]
        ring = ring_plan(placed, sizes, backward)
        allowed = [ring] if schedule == "ring" else weighed
        if schedule == "auto" and not (pinned or head_groups):
            allowed = [*weighed, ring]
        name = "backward" if backward else "forward"
        best = _choose(allowed, placed, memory_budget, name)
        table = _by_time([*weighed, ring])
        asked = " (as asked for)" if pinned or schedule == "ring" else ""
        reasons.append(f"{name} on {best}{asked}: {_summary(best.cost, placed)}{_baselines(best, table)}")
        chosen.append(best)
        tables.append(table)
    return TrainingPlan(
        forward=chosen[0],
        backward=chosen[1],
        reason=f"{'; '.join(reasons)} (predicted for {topology.name})",
        candidates=(tables[0], tables[1]),
    )


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
) -> DecodePlan:
    """The plan of one decode step over `world` ranks.

    The reduction with the lowest predicted time wins. Among those within 5 % of it, the one that sends the fewest bytes
    over the outermost level wins, then the one that sends the fewest bytes overall, then the simpler one. "allreduce",
    the paper's schedule, is a baseline: "auto" takes it only if its predicted time is below 0.9 of the best other time,
    or if nothing else fits the memory budget. "auto" never takes the ring, which moves the cache itself.

    Args:
        rows: b * s_q * h, the rows of a partial state.
        head_dim_v: d_v; a state is rows x (d_v + 1) fp32.
        kv_bytes: bytes of one rank's shard of the cache. None: unknown; predicted times then exclude the local
            attention, and the ring, which sends the cache, is considered only if it is requested.
        topology, placement: the machine, and the group's ranks in it.
        schedule: "auto", or a schedule's name; for "two_level" the exchange across nodes is still chosen.
        memory_budget: limit in bytes of a rank's communication buffers; None: no limit.
        deterministic: "auto" excludes "allreduce", whose summation order is up to the backend.

    Raises: ValueError for an unknown schedule, and if no schedule fits the budget.
    """
    placed = _placed(world, topology, placement)
    check_choice("schedule", schedule, DECODE_SCHEDULES)
    weighed = reductions(placed, StepSizes(rows, (head_dim_v + 1) * 4, kv_bytes or 0))
    if kv_bytes is None and schedule != "ring":
        weighed = [r for r in weighed if r.schedule != "ring"]
    if placed.block == 1 and schedule != "two_level":  # there it is an all-gather
        weighed = [r for r in weighed if r.schedule != "two_level"]
    never = ("ring", "allreduce") if deterministic else ("ring",)
    allowed = [r for r in weighed if (r.schedule not in never if schedule == "auto" else r.schedule == schedule)]
    best = _choose(allowed, placed, memory_budget, "decode step")
    table = _by_time(weighed)
    asked = "" if schedule == "auto" else " (as asked for)"
    return DecodePlan(
        schedule=best.schedule,
        across=best.across,
        cost=best.cost,
        reason=f"{best}{asked}: {_summary(best.cost, placed)}{_baselines(best, table)} (predicted for {topology.name})",
        candidates=table,
    )


def _placed(world: int, topology: Topology, placement: Placement) -> PlacedTopology:
    if world != len(placement.order):
        raise ValueError(f"world={world} but placement holds {len(placement.order)} ranks: place() the group itself")
    return placed_topology(topology, placement)


def _choose(allowed: Sequence[Candidate], placed: PlacedTopology, budget: int | None, name: str) -> Candidate:
    """The best candidate by the rule in the planners' docstrings; the first one if several are equal."""
    fitting = [c for c in allowed if _fits(c, budget)]
    if not fitting:
        need = min(c.cost.peak_bytes for c in allowed)
        raise ValueError(
            f"memory_budget={budget} bytes is too small for the {name}'s communication buffers: the least that "
            f"{'any schedule' if len(allowed) > 1 else 'this schedule'} needs is {need} bytes ({format_bytes(need)})"
        )
    trees = [c for c in fitting if c.schedule not in BASELINES]
    least = min((c.cost.time_s for c in trees), default=float("inf"))
    fitting = [c for c in fitting if c.schedule in BASELINES and c.cost.time_s < CLEARLY * least] or trees
    least = min(c.cost.time_s for c in fitting)
    tied = [c for c in fitting if c.cost.time_s <= TIE * least]
    return min(tied, key=lambda c: (c.cost.bytes_per_level[placed.top], round(c.cost.bytes)))


def _head_groups(variants: list[PassPlan], budget: int | None) -> PassPlan:
    """Among plans that differ in head groups only: the smallest buffers within `SAME` of the best time."""
    fitting = [v for v in variants if _fits(v, budget)]
    if not fitting:
        return min(variants, key=lambda v: v.cost.peak_bytes)
    least = min(v.cost.time_s for v in fitting)
    return min((v for v in fitting if v.cost.time_s <= SAME * least), key=lambda v: (v.cost.peak_bytes, v.head_groups))


def _fits(candidate: Candidate, budget: int | None) -> bool:
    return budget is None or candidate.cost.peak_bytes <= budget


def _by_time(weighed: list[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(weighed, key=lambda c: c.cost.time_s))


def _summary(cost: Cost, placed: PlacedTopology) -> str:
    over = (
        f", {format_bytes(cost.bytes_per_level[placed.top])} of them over {placed.topology.levels[placed.top].name}"
        if placed.top
        else ""
    )
    return f"{format_seconds(cost.time_s)} and {format_bytes(cost.bytes)} sent by a rank{over}"


def _baselines(best: Candidate, table: tuple[Candidate, ...]) -> str:
    """Predicted time and bytes of the ring, the KV gather and the all-reduce."""
    found = {
        "ring": [c for c in table if c.schedule == "ring"],
        "all-reduce": [c for c in table if c.schedule == "allreduce"],
        "KV gather": [c for c in table if c.schedule == "grid" and c.grid[0] == 1],
    }
    others = [
        f"{name} {format_seconds(same_kind[0].cost.time_s)} and {format_bytes(same_kind[0].cost.bytes)}"
        for name, same_kind in found.items()
        if same_kind and same_kind[0] is not best
    ]
    return f", against {', '.join(others)}" if others else ""
