"""A small discrete-event simulator of messages on a topology: the independent check of the planner's closed forms.

A rank executes steps: it sends some messages, waits for some, and continues. Messages in flight at the same time share
the links: a rank's own sending and receiving capacity at a level, and the ports of the units below it, in each
direction. Rates are max-min fair and change whenever a message starts or ends.
"""

import math
from dataclasses import dataclass, field

from megatron_tree.core.plan import Placement, Topology


@dataclass
class Step:
    """One step of a rank: `sends` as (position, bytes), and the number of messages that it waits for."""

    sends: list[tuple[int, float]] = field(default_factory=list)
    receives: int = 0


@dataclass
class _Message:
    source: int
    to: int
    step: int
    bytes: float
    level: int
    links: list
    issued: float
    starts: float = math.inf


def run(topology: Topology, placement: Placement, programs: list[list[Step]], *, posted: bool) -> float:
    """Seconds until the last rank has finished. programs: steps by position; step n sends to others' step n.

    posted: whether receives are posted long before. Otherwise a message starts when the sender has been informed that
    the receiver has reached the step.
    """
    return _Run(topology, placement, programs, posted).finish()


class _Run:
    def __init__(self, topology, placement, programs, posted):
        self.topology, self.placement, self.programs, self.posted = topology, placement, programs, posted
        self.now, self.at = 0.0, [-1] * len(programs)
        self.entered = [[math.inf] * len(program) for program in programs]
        self.arrived = [[0] * len(program) for program in programs]
        self.busy = [0.0] * len(programs)  # until when a rank's CPU is busy with its messages
        self.waiting, self.moving, self.flying = [], [], []
        for x in range(len(programs)):
            self._advance(x)

    def finish(self) -> float:
        while self.waiting or self.moving or self.flying:
            self._start_ready()
            rates = self._rates()
            ends = [self.now + m.bytes / r for m, r in zip(self.moving, rates)]
            moments = ends + [t for t, _ in self.flying] + [m.starts for m in self.waiting if m.starts > self.now]
            then = min(moments)
            for m, r in zip(self.moving, rates):
                m.bytes -= r * (then - self.now)
            self.now = then
            for m in [m for m, end in zip(self.moving, ends) if end <= then * (1 + 1e-12)]:
                self.moving.remove(m)
                self.flying.append((self.now + self.topology.levels[m.level].latency_s, m))
            for t, m in [f for f in self.flying if f[0] <= self.now * (1 + 1e-12)]:
                self.flying.remove((t, m))
                self.arrived[m.to][m.step] += 1
                self._advance(m.to)
        assert all(at == len(program) for at, program in zip(self.at, self.programs)), "a rank waits forever"
        return max(self.now, *self.busy)

    def _advance(self, x: int) -> None:
        """Advance a rank as far as possible."""
        program = self.programs[x]
        while self.at[x] < len(program):
            if self.at[x] >= 0 and self.arrived[x][self.at[x]] < program[self.at[x]].receives:
                return
            self.at[x] += 1
            if self.at[x] == len(program):
                return
            self.entered[x][self.at[x]] = self.now
            self.busy[x] = max(self.busy[x], self.now)
            for to, size in program[self.at[x]].sends:
                self.busy[x] += self.topology.overhead_s
                self.waiting.append(self._message(x, to, self.at[x], size, self.busy[x]))
        return

    def _message(self, x: int, to: int, step: int, size: float, issued: float) -> _Message:
        place, order = self.placement, self.placement.order
        level = place.level(order[x], order[to])
        spec = self.topology.levels[level]
        links = [(("out", x, level), spec.bandwidth), (("in", to, level), spec.bandwidth)]
        if level:
            units = place.units[order[x]][level - 1], place.units[order[to]][level - 1]
            links += [((way, "port", u, level), spec.port_bandwidth) for way, u in zip(("out", "in"), units)]
        return _Message(x, to, step, size, level, links, issued)

    def _start_ready(self) -> None:
        for m in list(self.waiting):
            ready = 0.0 if self.posted else self.entered[m.to][m.step] + self.topology.levels[m.level].latency_s
            m.starts = max(m.issued, ready)
            if m.starts <= self.now * (1 + 1e-12):
                self.waiting.remove(m)
                self.moving.append(m)

    def _rates(self) -> list[float]:
        """Max-min fair rates: the bottleneck link is shared equally, its messages' rates are fixed, and so on."""
        rates, open_ = {}, dict(enumerate(self.moving))
        left, users = {}, {}
        for i, m in open_.items():
            for link, capacity in m.links:
                left[link] = capacity
                users.setdefault(link, set()).add(i)
        while open_:
            link = min((k for k in users if users[k]), key=lambda k: left[k] / len(users[k]))
            share = left[link] / len(users[link])
            for i in list(users[link]):
                rates[i] = share
                for other, _ in open_.pop(i).links:
                    left[other] -= share
                    users[other].discard(i)
        return [rates[i] for i in range(len(self.moving))]
