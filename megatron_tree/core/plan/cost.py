"""The cost model: how long messages take on the links of a topology.

A **phase** is what one rank sends over one level at once. Phases of different levels that run at the same time form a
**stage**; stages run one after another. For each level, a stage takes

    latency * hops + max(bytes of the rank / bandwidth, bytes of all ranks behind the port / port_bandwidth)

seconds. The slowest level counts, plus the overhead of all calls (of all ranks' messages, where ranks share cores),
during which a rank without GPU streams computes nothing. Copying what is sent slows its compute, too.
gloo sends a message only after its receiver has reported that it is ready. Unless receives are posted early, this takes
one more latency, which overlaps with the overheads. Bytes follow from the ranks' actual positions. Ranks with the same
distances to their peers have the same cost, so the costs of a few probes are enough.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from .topology import Placement, Topology

PROBES = 16  # ranks whose cost is computed where not all ranks are alike


class Phase(NamedTuple):
    """What the busiest rank sends over one level at once."""

    level: int
    messages: int
    """Sent one after another, in flight together."""
    bytes: float
    """Total of these messages."""
    sharers: int = 1
    """Ranks that send as much through the same port, this one included."""
    hops: int = 1
    """Latencies that add up."""


class Stage(NamedTuple):
    """Phases that run at the same time, for a `PassClock`."""

    busy: dict[object, float]
    """Seconds by resource: the levels of a topology and, for built-in collectives, their stream."""
    posting: float = 0.0
    """Seconds in which the rank posts messages, before anything is sent."""
    copying: float = 0.0
    """Seconds of the rank's compute that it loses while they are sent."""

    @property
    def seconds(self) -> float:
        return self.posting + max(self.busy.values())


class PlacedTopology:
    """A topology and the positions of a group's ranks in it, numbered as in `Placement.order`."""

    def __init__(self, topology: Topology, placement: Placement):
        self.topology, self.placement = topology, placement
        self.world, self.block, self.top = len(placement.order), placement.block, placement.top
        self.nodes = self.world // self.block
        self.direct = topology.transport in ("direct", "shm")
        self.shared, self.reads_peers = topology.transport == "shm", topology.transport == "symm_mem"
        self.units = [placement.units[r] for r in placement.order]
        self.population = [Counter(unit[i] for unit in self.units) for i in range(len(topology.levels))]
        self._first = [dict(zip(n, itertools.accumulate(n.values(), initial=0))) for n in self.population]
        self._levels: dict[int, list[int | None]] = {}  # of positions asked for, which are few
        self.alike = self.top == 0 or (self.top == 1 and len(set(self.population[0].values())) == 1)
        """Whether every rank has equally many peers at each distance."""
        self.probes = (0,) if self.alike else spread(self.block if self.block > 1 else self.world)

    def level(self, x: int, y: int) -> int:
        """Index of the lowest level that has two positions in one unit."""
        for i, (m, n) in enumerate(zip(self.units[x], self.units[y])):
            if m == n:
                return i
        raise AssertionError("the outermost unit holds all ranks")

    def behind(self, x: int, level: int) -> int:
        """Ranks that share the port by which position x reaches a level."""
        return self.population[level - 1][self.units[x][level - 1]] if level else 1

    def count(self, x: int, peers: Iterable[int]) -> Counter:
        """How many of `peers` position x reaches over each level."""
        reached = Counter(map(self._levels_from(x).__getitem__, peers))
        del reached[None]
        return reached

    def _levels_from(self, x: int) -> list[int | None]:
        """`level(x, y)` of every position y, None of x itself."""
        if x not in self._levels:
            levels: list[int | None] = [self.top] * self.world
            for i in reversed(range(self.top)):  # units are contiguous: the smaller ones are written over the larger
                first, size = self._first[i][self.units[x][i]], self.population[i][self.units[x][i]]
                levels[first : first + size] = [i] * size
            levels[x] = None
            self._levels[x] = levels
        return self._levels[x]

    def everyone(self, x: int) -> Counter:
        """How many of all others position x reaches over each level."""
        unit = self.units[x]
        held = [1] + [self.population[i][unit[i]] for i in range(self.top + 1)]
        return Counter({i: held[i + 1] - held[i] for i in range(self.top + 1) if held[i + 1] > held[i]})

    def time(self, stage: Iterable[Phase], calls: int | None = None, **options) -> float:
        """Seconds of phases that run at the same time; arguments as in `busy`."""
        return max(self.busy(stage, calls, **options).values(), default=0.0)

    def busy(
        self, stage: Iterable[Phase], calls: int | None = None, *, posted: bool = True, active: int | None = None
    ) -> dict[int, float]:
        """Seconds until each level has done its part of phases that start together.

        calls: number of calls, if not one per message. posted: whether receives are posted early. active: number of
        ranks that send as many messages, if not all.
        """
        moved, ready, messages = {}, 0.0, 0
        for phase in stage:
            level = self.topology.levels[phase.level]
            flow = max(phase.bytes / level.bandwidth, phase.bytes * phase.sharers / level.port_bandwidth)
            moved[phase.level] = max(moved.get(phase.level, 0.0), phase.hops * level.latency_s + flow)
            ready = max(ready, 0.0 if posted or not self.direct else level.latency_s)
            messages += phase.messages
        start = max(ready, self.posting(messages, calls, active)) + (self.topology.wake_s if messages else 0.0)
        return {level: start + seconds for level, seconds in moved.items()}

    def posting(self, messages: int, calls: int | None = None, active: int | None = None) -> float:
        """Seconds of a rank's CPU time for its messages, and while it waits for a core; arguments as in `busy`."""
        calls_s = (messages if calls is None else calls) * self.topology.overhead_s
        return max(calls_s, messages * (self.world if active is None else active) * self.topology.shared_overhead_s)

    def stage(self, phases: Iterable[Phase], *, posted: bool) -> Stage:
        """Of messages that the rank itself posts and copies (the direct transport)."""
        phases = list(phases)
        posting = self.posting(sum(phase.messages for phase in phases))
        links = {level: seconds - posting for level, seconds in self.busy(phases, posted=posted).items()}
        return Stage(links, posting, self.topology.byte_s * sum(phase.bytes for phase in phases))

    def exchange(self, counts: Callable[[int], Counter], message_bytes: float, calls: int | None = None):
        """Every rank sends messages of one size at once; `counts(position)` gives their number over each level.

        Returns (seconds of the slowest rank, mean bytes per level).
        """
        slowest, mean = 0.0, [0.0] * len(self.topology.levels)
        for x in self.probes:
            messages = counts(x)
            stage = [Phase(i, n, n * message_bytes, self.behind(x, i)) for i, n in messages.items()]
            slowest = max(slowest, self.time(stage, calls))
            for i, n in messages.items():
                mean[i] += n * message_bytes / len(self.probes)
        return slowest, mean

    @cached_property
    def hops(self) -> Counter:
        """How many of the p hops of a ring in the order of positions go over each level."""
        return Counter(self.level(x, (x + 1) % self.world) for x in range(self.world))

    def shift(self, sizes: list[float], hops: Counter | None = None, sharers: int = 1) -> tuple[float, list[float]]:
        """Every rank sends messages of these sizes to the next: (seconds on the slowest hop, mean bytes per level).

        hops: of all ranks over each level; default: those of one ring. sharers: ranks of a node that send through its
        port.
        """
        hops = self.hops if hops is None else hops
        if self.world == 1 or not hops:
            return 0.0, [0.0] * len(self.topology.levels)
        phases = [Phase(i, len(sizes), sum(sizes), sharers if i else 1) for i in hops]
        slowest = max(self.time([phase], posted=False) for phase in phases)
        return slowest, [hops[i] / self.world * sum(sizes) for i in range(len(self.topology.levels))]


@lru_cache(maxsize=64)
def placed_topology(topology: Topology, placement: Placement) -> PlacedTopology:
    """`PlacedTopology(topology, placement)`, cached."""
    return PlacedTopology(topology, placement)


def spread(n: int) -> tuple[int, ...]:
    """Up to PROBES of n positions, evenly spread."""
    return tuple(sorted({i * n // PROBES for i in range(PROBES)})) if n > PROBES else tuple(range(n))


class PassClock:
    """Predicts a pass by running through it: what is sent keeps its links busy, what is computed keeps the rank busy.

    Stages that use the same resource follow one another.
    """

    def __init__(self):
        self.now = 0.0
        self._free: dict[object, float] = {}

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def start(self, stages: Iterable[Stage]) -> InFlight:
        """Start the first of a collective's stages."""
        sent = InFlight(list(stages))
        self.advance(sent)
        return sent

    def advance(self, sent: InFlight) -> None:
        """Wait for the stage under way, and start the next."""
        self.now = max(self.now, sent.done)
        if sent.stages:
            stage = sent.stages.pop(0)
            self.compute(stage.posting)
            for resource, seconds in stage.busy.items():
                free = self._free[resource] = max(self.now, self._free.get(resource, 0.0)) + seconds
                sent.done = max(sent.done, free)
            self.compute(stage.copying)

    def wait(self, sent: InFlight) -> None:
        while sent.stages:
            self.advance(sent)
        self.now = max(self.now, sent.done)


@dataclass
class InFlight:
    """A collective under way: the stages that are left, and when the one under way is done."""

    stages: list[Stage]
    done: float = 0.0
