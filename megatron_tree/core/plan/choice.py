"""Which candidate is taken: the one with the shortest predicted time.

Times within 1 % of it count as equal. Then the baselines (the ring, the paper's all-reduces) come last, and the
candidate wins that sends the fewest bytes over the outermost level, then the fewest bytes overall, then the simpler
one. `alternatives` are plans that would be chosen if the network were another than assumed: what is worth a try.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..units import format_bytes
from .cost import PlacedTopology
from .plans import DecodePlan, PassPlan, ReductionPlan, TrainingPlan
from .topology import Topology

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


Plan = TrainingPlan | DecodePlan
FACTOR = 10.0  # by which latencies and bandwidths may be wrong
MEMORY = 4  # buffers may be so many times as large as the chosen plan's


def alternatives(plan_on: Callable[..., Plan], topology: Topology, *, backward: bool = True) -> tuple[Plan, ...]:
    """The plan for this topology, and those for networks `FACTOR` times as fast and as slow, in what a message costs
    and in what a byte costs, without duplicates: at most five. Whatever the network is in between, one fits.

    Plans with much larger buffers than the first one's are left out: to try one must not run out of memory. backward:
    whether plans of training that differ in their backward only are different. If not, the ring is one more: rules that
    put it last count both passes.
    """
    first, *others = (plan_on(topology=x) for x in (topology, *_networks(topology)))
    if not backward and isinstance(first, TrainingPlan):
        rings = [x for x in first.candidates[0] if x.schedule == "ring"]  # fastest first
        others += [dataclasses.replace(first, forward=ring) for ring in rings[:1]]
    room = max(MEMORY * _buffers(first), SMALL)
    plans: dict[tuple[str, ...], Plan] = {}
    for plan in (first, *others):
        if _buffers(plan) <= room:
            passes = passes_of(plan) if backward else passes_of(plan)[:1]
            plans.setdefault(tuple(map(str, passes)), plan)
    return tuple(plans.values())


def _networks(topology: Topology) -> Iterator[Topology]:
    factors = (1 / FACTOR, FACTOR)
    for message, byte in itertools.product(factors, factors):
        yield dataclasses.replace(
            topology,
            levels=tuple(
                dataclasses.replace(
                    level,
                    latency_s=level.latency_s * message,
                    bandwidth=level.bandwidth / byte,
                    port_bandwidth=level.port_bandwidth / byte,
                )
                for level in topology.levels
            ),
            overhead_s=topology.overhead_s * message,
            shared_overhead_s=topology.shared_overhead_s * message,
            wake_s=topology.wake_s * message,
            flops=topology.flops * max(message, byte, 1.0),  # where a plan counts, nothing hides its messages
        )


def passes_of(plan: Plan) -> tuple[PassPlan, ...] | tuple[ReductionPlan]:
    """What a plan is made of: forward and backward, or one reduction."""
    return (plan.forward, plan.backward) if isinstance(plan, TrainingPlan) else (plan,)


def _buffers(plan: Plan) -> int:
    return max(x.cost.peak_bytes for x in passes_of(plan))
