"""Which candidate is taken: the one with the shortest predicted time.

Times within 1 % of it count as equal. Then the baselines (the ring, the paper's all-reduces) come last, and the
candidate wins that sends the fewest bytes over the outermost level, then the fewest bytes overall, then the simpler
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..units import format_bytes
from .cost import PlacedTopology
from .plans import PassPlan, ReductionPlan

BASELINES = ("allreduce", "ring")
TIE = 1.01  # predicted times that differ by less count as equal
MAX_HEAD_CHUNKS = 16
SMALL = 1 << 24  # buffers of so many bytes are not worth another head chunk

Candidate = TypeVar("Candidate", PassPlan, ReductionPlan)


def choose_pair(
    options: Sequence[Sequence[Sequence[PassPlan]]],
    placed: PlacedTopology,
    budget: int | None,
    names: tuple[str, str] = ("forward", "backward"),
) -> tuple[PassPlan, PassPlan]:
    """The best forward and backward. Each of the options lists the candidates of both passes that go together.

    Where an option is faster than necessary, both passes may be slower than their fastest candidates, by one factor.
    """
    fitting = [[[c for c in candidates if fits(c, budget)] for candidates in passes] for passes in options]
    fitting = [passes for passes in fitting if all(passes)]
    if not fitting:  # each pass may fit on its own, with another exchange of heads
        least = min(options, key=lambda passes: max(min(c.cost.peak_bytes for c in of_pass) for of_pass in passes))
        for name, candidates in zip(names, least):
            choose(candidates, placed, budget, name)
    bests = [sum(_least(candidates) for candidates in passes) for passes in fitting]
    limit = TIE * min(bests)
    pairs = [
        tuple(
            _best([c for c in candidates if c.cost.time_s * best <= limit * _least(candidates)], placed)
            for candidates in passes
        )
        for passes, best in zip(fitting, bests)
        if best <= limit
    ]
    return min(pairs, key=lambda pair: _order(pair, placed))


def choose(allowed: Sequence[Candidate], placed: PlacedTopology, budget: int | None, name: str) -> Candidate:
    """The best candidate, by the rule above; the first one if several are equal."""
    fitting = [c for c in allowed if fits(c, budget)]
    if not fitting:
        need = min(c.cost.peak_bytes for c in allowed)
        raise ValueError(
            f"memory_budget={budget} bytes is too small for the communication buffers of the {name}: the least that "
            f"{'any schedule' if len(allowed) > 1 else 'this schedule'} needs is {need} bytes ({format_bytes(need)})"
        )
    return _best([c for c in fitting if c.cost.time_s <= TIE * _least(fitting)], placed)


def _least(candidates: Sequence[Candidate]) -> float:
    return min(c.cost.time_s for c in candidates)


def _best(tied: Sequence[Candidate], placed: PlacedTopology) -> Candidate:
    return min(tied, key=lambda c: _order((c,), placed))


def _order(passes: Sequence[Candidate], placed: PlacedTopology) -> tuple[int, float, int]:
    """Baselines, then bytes over the outermost level, then all bytes."""
    baselines = sum(c.schedule in BASELINES for c in passes)
    return baselines, sum(c.cost.bytes_per_level[placed.top] for c in passes), sum(round(c.cost.bytes) for c in passes)


def choose_head_chunks(variants: list[PassPlan], budget: int | None) -> PassPlan:
    """Among plans that differ in head chunks only: the smallest buffers within `TIE` of the best time. Of
    small ones the fewest chunks, since every chunk calls the kernels once more."""
    fitting = [v for v in variants if fits(v, budget)]
    if not fitting:
        return min(variants, key=lambda v: v.cost.peak_bytes)
    least = min(v.cost.time_s for v in fitting)
    same = [v for v in fitting if v.cost.time_s <= TIE * least]
    return min(same, key=lambda v: (max(v.cost.peak_bytes, SMALL), v.head_chunks))


def fits(candidate: Candidate, budget: int | None) -> bool:
    return budget is None or candidate.cost.peak_bytes <= budget
