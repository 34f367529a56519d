"""Plans that would be chosen if the network were another than assumed: what is worth a try."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from .choice import SMALL
from .plans import TrainingPlan
from .topology import Topology

FACTORS = (1.0, 0.1, 10.0)  # of latencies, and of bandwidths
MEMORY = 2  # buffers may be so many times as large as the chosen plan's


def alternatives(plan_on: Callable[[Topology], TrainingPlan], topology: Topology) -> tuple[TrainingPlan, ...]:
    """The plans for this topology and for networks ten times as fast and as slow, in latency and in bandwidth, without
    duplicates; that for the topology itself first. Whatever the network is within these bounds, a good plan is there.

    Plans with much larger buffers than the first one's are left out: to try one must not run out of memory.
    """
    first, *others = map(plan_on, _networks(topology))
    room = max(MEMORY * _buffers(first), SMALL)
    plans = {_key(first): first}
    for plan in others:
        if _buffers(plan) <= room:
            plans.setdefault(_key(plan), plan)
    return tuple(plans.values())


def _networks(topology: Topology) -> Iterator[Topology]:
    for slower, faster in itertools.product(FACTORS, FACTORS):
        yield dataclasses.replace(
            topology,
            levels=tuple(
                dataclasses.replace(
                    level,
                    latency_s=level.latency_s * slower,
                    bandwidth=level.bandwidth * faster,
                    port_bandwidth=level.port_bandwidth * faster,
                )
                for level in topology.levels
            ),
        )


def _key(plan: TrainingPlan) -> tuple:
    return tuple((p.schedule, p.arrangement, p.head_chunks) for p in (plan.forward, plan.backward))


def _buffers(plan: TrainingPlan) -> int:
    return max(plan.forward.cost.peak_bytes, plan.backward.cost.peak_bytes)
