"""Plans that would be chosen if the network were another than assumed: what is worth a try."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from .choice import SMALL
from .plans import DecodePlan, PassPlan, ReductionPlan, TrainingPlan
from .topology import Topology

Plan = TrainingPlan | DecodePlan
FACTOR = 10.0  # by which latencies and bandwidths may be wrong
MEMORY = 4  # buffers may be so many times as large as the chosen plan's


def alternatives(plan_on: Callable[..., Plan], topology: Topology, *, backward: bool = True) -> tuple[Plan, ...]:
    """The plan for this topology, and those for networks `FACTOR` times as fast and as slow, in what a message costs
    and in what a byte costs, without duplicates: at most five. Whatever the network is in between, one fits.

    Plans with much larger buffers than the first one's are left out: to try one must not run out of memory. backward:
    whether plans of training that differ in their backward only are different.
    """
    first, *others = (plan_on(topology=x) for x in (topology, *_networks(topology)))
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
