"""How the ranks find the k best keys of every query: they merge lists of scores, or count scores above thresholds.

A list has k entries of 8 bytes. It is merged as partial results are (decode.py). "counts" finds the k-th score instead:
every round counts the keys by the next bits of their scores' 32, in so many words of 4 bytes, and sums that over the
ranks. More bits a round are fewer rounds, of more bytes. Of p ranks one sends, for each query,

    allgather    8 k (p - 1)                  butterfly    8 k log2 p
    scatter      16 k (p - 1) / p             counts       4 * 2^bits * ceil(32 / bits), times p - 1 or 2 (p - 1) / p

bytes; counts of as many rounds again follow if more keys have the k-th score than are selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..config import SELECT_SCHEDULES, check_choice
from ..units import format_bytes, format_seconds
from .choice import choose
from .cost import PlacedTopology, placed_topology
from .decode import Rounds, StepSizes, add_sum, reductions
from .plans import Cost, ReductionPlan
from .topology import Placement, Topology

SCORE_BITS = 32
ENTRY_BYTES = 8  # of a list: score and position
COUNT_BITS = (11, 8, 6)  # of a round


@dataclass(frozen=True, kw_only=True)
class SelectPlan(ReductionPlan):
    """How the ranks agree on every query's k-th best key."""

    bits: int = 0
    """Of a round of "counts"."""

    def __str__(self) -> str:
        return f"counts of {self.bits} bits" if self.bits else super().__str__()


@lru_cache(maxsize=4096)
def plan_select(
    world: int,
    *,
    rows: int,
    topk: int,
    topology: Topology,
    placement: Placement,
    schedule: str = "auto",
    memory_budget: int | None = None,
) -> tuple[SelectPlan, str]:
    """The fastest way to select keys over `world` ranks, and the reason in one sentence.

    Args:
        rows: queries, b * n. topk: keys of a query.
        topology, placement: the machine, and the group's ranks in it.
        schedule: one of `SELECT_SCHEDULES`.
        memory_budget: limit in bytes of a rank's communication buffers; None: no limit.

    Raises: ValueError for an unknown schedule, and if none fits the budget.
    """
    check_choice("schedule", schedule, SELECT_SCHEDULES)
    placed = placed_topology(topology, placement)
    weighed = [*_lists(placed, rows, topk), *(_counts(placed, rows, bits) for bits in COUNT_BITS)]
    allowed = [plan for plan in weighed if schedule in ("auto", plan.schedule)]
    best = choose(allowed, placed, memory_budget, "selection of keys")
    asked = "" if schedule == "auto" else " (as asked for)"
    cost = f"{format_seconds(best.cost.time_s)} and {format_bytes(best.cost.bytes)} sent by a rank"
    return best, f"{best}{asked}: {cost} (predicted for {topology.name})"


def _lists(placed: PlacedTopology, rows: int, topk: int) -> list[SelectPlan]:
    plans = reductions(placed, StepSizes(rows, ENTRY_BYTES * topk, 0))
    return [SelectPlan(**vars(plan)) for plan in plans if plan.schedule in SELECT_SCHEDULES]


def _counts(placed: PlacedTopology, rows: int, bits: int) -> SelectPlan:
    rounds, size = Rounds(placed), rows * (4 << bits)
    for _ in range(-(-SCORE_BITS // bits)):
        if placed.world > 1:
            add_sum(rounds, size)
    cost = Cost(
        time_s=rounds.time,
        compute_s=0.0,
        bytes_per_level=tuple(rounds.sent),
        steps=rounds.steps,
        peak_bytes=placed.world * size if placed.world > 1 else 0,
    )
    return SelectPlan(schedule="counts", across="direct", cost=cost, bits=bits)
