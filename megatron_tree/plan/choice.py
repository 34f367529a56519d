"""Which candidate is taken: the fastest, then the one that sends least; baselines only where they clearly win."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..units import format_bytes
from .cost import PlacedTopology
from .plans import PassPlan, Reduction

BASELINES = ("allreduce", "ring")
TIE = 1.05  # schedules whose predicted times differ by less count as equally fast
SAME = 1.01  # the same for the numbers of head groups of one grid
CLEARLY = 0.9  # a baseline is chosen only below this fraction of the best other time

Candidate = TypeVar("Candidate", PassPlan, Reduction)


def choose_pair(
    options: Sequence[Sequence[Sequence[PassPlan]]], placed: PlacedTopology, budget: int | None
) -> tuple[PassPlan, PassPlan]:
    """The best forward and backward of one option; an option is the candidates of both that may stand together."""
    pairs = []
    for passes in options:
        if all(any(fits(c, budget) for c in candidates) for candidates in passes):
            pairs.append(tuple(choose(candidates, placed, budget, "") for candidates in passes))
    if not pairs:  # each pass may fit on its own, with another exchange of heads
        least = min(options, key=lambda passes: max(min(c.cost.peak_bytes for c in of_pass) for of_pass in passes))
        for name, candidates in zip(("forward", "backward"), least):
            choose(candidates, placed, budget, name)
    return min(_tied(pairs), key=lambda pair: _traffic(pair, placed))


def choose(allowed: Sequence[Candidate], placed: PlacedTopology, budget: int | None, name: str) -> Candidate:
    """The best candidate by the rule in the planners' docstrings; the first one if several are equal."""
    fitting = [c for c in allowed if fits(c, budget)]
    if not fitting:
        need = min(c.cost.peak_bytes for c in allowed)
        raise ValueError(
            f"memory_budget={budget} bytes is too small for the {name}'s communication buffers: the least that "
            f"{'any schedule' if len(allowed) > 1 else 'this schedule'} needs is {need} bytes ({format_bytes(need)})"
        )
    (best,) = min(_tied([(c,) for c in fitting]), key=lambda one: _traffic(one, placed))
    return best


def _tied(options: Sequence[tuple[Candidate, ...]]) -> list[tuple[Candidate, ...]]:
    """Options whose time is within `TIE` of the best; those with a baseline only if that is clearly faster."""

    def time_of(option: tuple[Candidate, ...]) -> float:
        return sum(c.cost.time_s for c in option)

    trees = [option for option in options if not any(c.schedule in BASELINES for c in option)]
    limit = CLEARLY * min(map(time_of, trees), default=float("inf"))
    found = [option for option in options if option not in trees and time_of(option) < limit] or trees
    least = min(map(time_of, found))
    return [option for option in found if time_of(option) <= TIE * least]


def _traffic(option: tuple[Candidate, ...], placed: PlacedTopology) -> tuple[float, int]:
    """Bytes over the outermost level, and all bytes."""
    return sum(c.cost.bytes_per_level[placed.top] for c in option), sum(round(c.cost.bytes) for c in option)


def choose_head_groups(variants: list[PassPlan], budget: int | None) -> PassPlan:
    """Among plans that differ in head groups only: the smallest buffers within `SAME` of the best time."""
    fitting = [v for v in variants if fits(v, budget)]
    if not fitting:
        return min(variants, key=lambda v: v.cost.peak_bytes)
    least = min(v.cost.time_s for v in fitting)
    return min((v for v in fitting if v.cost.time_s <= SAME * least), key=lambda v: (v.cost.peak_bytes, v.head_groups))


def fits(candidate: Candidate, budget: int | None) -> bool:
    return budget is None or candidate.cost.peak_bytes <= budget
