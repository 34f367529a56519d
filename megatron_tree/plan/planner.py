"""Which schedule a call uses: pure functions of sizes and of the network, no tensors, no communication.

Every candidate gets a predicted cost (`training.py`, `decode.py`, on the model of `cost.py`); the fastest wins. All
ranks compute the same plan from the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from ..config import DECODE_SCHEDULES, SCHEDULES, check_choice
from .cost import Network, network
from .decode import Step, reductions
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
    seconds,
    size,
)
from .topology import Placement, Topology
from .training import Call, backward_words, forward_words, grid_plan, ring_plan

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
TIE = 1.05  # predicted times of schedules that count as equal
SAME = 1.01  # predicted times of one grid that count as equal
CLEARLY = 0.9  # a baseline is chosen only below this part of the best other time
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

    The fastest predicted grid and nesting wins; within 5 % the one that sends fewest bytes over the outermost level,
    then fewest in all. Of its numbers of head groups that come within 1 % of its best time, the one with the smallest
    buffers is taken. The ring is taken if it is asked for, or if it is predicted to take less than 0.9 of the best
    grid's time, or if nothing else fits the memory.

    Args:
        shape: heads and their sizes on one rank.
        batch, seq_len: of the call; seq_len is that of the whole sequence.
        seq_len_kv: of cross attention's keys; default seq_len.
        visible: share of the (query, key) pairs that packed documents leave, before the causal mask.
        bytes_per_word: of the inputs, which is also what travels.
        topology, placement: the machine, and the group's ranks in it.
        schedule: "auto", "grid" or "ring".
        grid, grid_backward: pinned grids (a, b); `grid` holds for the backward, too, unless `grid_backward` is given.
        head_groups: pinned number of head groups; it must divide num_heads_kv.
        memory_budget: bytes of communication buffers that a rank may use, None for any.

    Raises: ValueError for options that contradict one another, and if nothing fits the budget.
    """
    net = _network(world, topology, placement)
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
    sizes = dict(batch=batch, seq_len=seq_len, seq_len_kv=seq_len_kv, bytes_per_word=bytes_per_word)
    call = Call.of(world, shape, **sizes, causal=causal, visible=visible)
    groups = [n for n in range(1, MAX_HEAD_GROUPS + 1) if shape.num_heads_kv % n == 0] if world > 1 else [1]
    groups = [head_groups] if head_groups else groups
    chosen, tables, reasons = [], [], []
    for backward, pinned in ((False, grid), (True, grid_backward or grid)):
        weighed = [
            _head_groups([grid_plan(net, call, cells, inner, n, backward) for n in groups], memory_budget)
            for cells in ([pinned] if pinned else grids(world))
            for inner in inner_grids(cells, net.block)
        ]
        ring = ring_plan(net, call, backward)
        allowed = [ring] if schedule == "ring" else weighed
        if schedule == "auto" and not (pinned or head_groups):
            allowed = [*weighed, ring]
        name = "backward" if backward else "forward"
        best = _choose(allowed, net, memory_budget, name)
        table = _by_time([*weighed, ring])
        asked = " (as asked for)" if pinned or schedule == "ring" else ""
        reasons.append(f"{name} on {best}{asked}: {_told(best.cost, net)}{_rivals(best, table)}")
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

    The fastest predicted reduction wins; within 5 % the one that sends fewest bytes over the outermost level, then
    fewest in all, then the simpler one. "allreduce", the paper's schedule, is a baseline: "auto" takes it only if it is
    predicted to take less than 0.9 of the best other time, or if nothing else fits the memory. "auto" never takes the
    ring: it moves the cache itself.

    Args:
        rows: b * s_q * h, the rows of a partial state.
        head_dim_v: d_v; a state is rows x (d_v + 1) fp32.
        kv_bytes: of one rank's shard of the cache. None: unknown; predicted times leave the local attention out, and
            the ring, which sends the cache, is weighed only if it is asked for.
        topology, placement: the machine, and the group's ranks in it.
        schedule: "auto", or the one to take; of "two_level" the better exchange across nodes is still chosen.
        memory_budget: bytes of communication buffers that a rank may use, None for any.
        deterministic: "auto" leaves "allreduce" out, whose order of summing is the backend's.

    Raises: ValueError for an unknown schedule, and if nothing fits the budget.
    """
    net = _network(world, topology, placement)
    check_choice("schedule", schedule, DECODE_SCHEDULES)
    weighed = reductions(net, Step(rows, (head_dim_v + 1) * 4, kv_bytes or 0))
    if kv_bytes is None and schedule != "ring":
        weighed = [r for r in weighed if r.schedule != "ring"]
    if net.block == 1 and schedule != "two_level":  # there it is an all-gather
        weighed = [r for r in weighed if r.schedule != "two_level"]
    never = ("ring", "allreduce") if deterministic else ("ring",)
    allowed = [r for r in weighed if (r.schedule not in never if schedule == "auto" else r.schedule == schedule)]
    best = _choose(allowed, net, memory_budget, "decode step")
    table = _by_time(weighed)
    asked = "" if schedule == "auto" else " (as asked for)"
    return DecodePlan(
        schedule=best.schedule,
        across=best.across,
        cost=best.cost,
        reason=f"{best}{asked}: {_told(best.cost, net)}{_rivals(best, table)} (predicted for {topology.name})",
        candidates=table,
    )


def _network(world: int, topology: Topology, placement: Placement) -> Network:
    if world != len(placement.order):
        raise ValueError(f"world={world} but placement holds {len(placement.order)} ranks: place() the group itself")
    return network(topology, placement)


def _choose(allowed: Sequence[Candidate], net: Network, budget: int | None, name: str) -> Candidate:
    """The best candidate by the rule that the planners state; of equal ones the first."""
    fitting = [c for c in allowed if _fits(c, budget)]
    if not fitting:
        need = min(c.cost.peak_bytes for c in allowed)
        raise ValueError(
            f"memory_budget={budget} bytes is too small for the {name}'s communication buffers: the least that "
            f"{'any schedule' if len(allowed) > 1 else 'this schedule'} needs is {need} bytes ({size(need)})"
        )
    trees = [c for c in fitting if c.schedule not in BASELINES]
    least = min((c.cost.time_s for c in trees), default=float("inf"))
    fitting = [c for c in fitting if c.schedule in BASELINES and c.cost.time_s < CLEARLY * least] or trees
    least = min(c.cost.time_s for c in fitting)
    tied = [c for c in fitting if c.cost.time_s <= TIE * least]
    return min(tied, key=lambda c: (c.cost.bytes_per_level[net.top], round(c.cost.bytes)))


def _head_groups(variants: list[PassPlan], budget: int | None) -> PassPlan:
    """Of plans that differ in head groups: the smallest buffers that hardly cost time, or the smallest if none fits."""
    fitting = [v for v in variants if _fits(v, budget)]
    if not fitting:
        return min(variants, key=lambda v: v.cost.peak_bytes)
    least = min(v.cost.time_s for v in fitting)
    return min((v for v in fitting if v.cost.time_s <= SAME * least), key=lambda v: (v.cost.peak_bytes, v.head_groups))


def _fits(candidate: Candidate, budget: int | None) -> bool:
    return budget is None or candidate.cost.peak_bytes <= budget


def _by_time(weighed: list[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(weighed, key=lambda c: c.cost.time_s))


def _told(cost: Cost, net: Network) -> str:
    over = (
        f", {size(cost.bytes_per_level[net.top])} of them over {net.topology.levels[net.top].name}" if net.top else ""
    )
    return f"{seconds(cost.time_s)} and {size(cost.bytes)} sent by a rank{over}"


def _rivals(best: Candidate, table: tuple[Candidate, ...]) -> str:
    """What the ring, the KV gather and the all-reduce would take."""
    found = {
        "ring": [c for c in table if c.schedule == "ring"],
        "all-reduce": [c for c in table if c.schedule == "allreduce"],
        "KV gather": [c for c in table if c.schedule == "grid" and c.grid[0] == 1],
    }
    told = [
        f"{name} {seconds(rivals[0].cost.time_s)} and {size(rivals[0].cost.bytes)}"
        for name, rivals in found.items()
        if rivals and rivals[0] is not best
    ]
    return f", against {', '.join(told)}" if told else ""
