"""The predicted cost of one decode step: a rank's attention over its shard, then one reduction of the partial states.

A state is rows x (d_v + 1) fp32. Receives are posted before the local attention, so an exchange takes one latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from .cost import Network, Phase
from .plans import Cost, Reduction

GLOO_LATENCIES = 1.7  # of a round of gloo's all-reduce: measured; two of its messages are under way at a time


class Step(NamedTuple):
    """Sizes of one decode step in bytes."""

    rows: int
    row_bytes: int
    kv_bytes: int

    @property
    def state(self) -> int:
        return self.rows * self.row_bytes


class _Sum:
    """Adds up what a reduction takes after the local attention."""

    def __init__(self, net: Network):
        self.net, self.time, self.sent, self.steps = net, 0.0, [0.0] * len(net.topology.levels), 0

    def add(self, time: float, sent: list[float], steps: int = 1):
        self.time += time
        self.sent = [m + n for m, n in zip(self.sent, sent)]
        self.steps += steps

    def merge(self, states: float, state_bytes: float):
        """Read that many states and merge them."""
        self.time += states * state_bytes / self.net.topology.memory_bandwidth


def _all_to_all(total: _Sum, share: float) -> None:
    """Every rank sends a share to every other at once."""
    net = total.net
    total.add(*net.exchange(net.everyone, share, None if net.direct else 1))


def _around(total: _Sum, share: float, rounds: int, *, hops: Callable[[int, int], int]) -> None:
    """A built-in collective that passes `rounds` shares along a ring through all ranks.

    `hops(level, hops of the ring there)` is its latencies. gloo waits for the slowest hop in every round, and mostly
    for the receiver to say that it is ready; others pass on without waiting and use all ports of a unit.
    """
    net = total.net
    p, levels = net.world, net.topology.levels
    sent = [net.hops[i] / p * rounds * share for i in range(len(levels))]
    if net.direct:
        slowest = max(levels[i].latency_s for i in net.hops)
        flow = max(share / levels[i].bandwidth for i in net.hops)
        total.add(rounds * (GLOO_LATENCIES * slowest + flow), sent)
        return
    latency = sum(hops(i, n) * levels[i].latency_s for i, n in net.hops.items())
    behind = {i: net.behind(0, i) for i in net.hops}
    stage = [Phase(i, 1, rounds * share / n, sharers=n, hops=0) for i, n in behind.items()]
    total.add(latency + net.time(stage, 1), sent)


def _allreduce(net: Network, step: Step) -> tuple[_Sum, int]:
    """The paper's Algorithm 3: MAX of lse, then SUM of packed numerators and denominators."""
    total, p = _Sum(net), net.world

    def hops(level: int, n: int) -> int:  # up and down a chain inside the innermost units and a tree of units
        return 2 * ((len(net.population[level - 1]) - 1).bit_length() if level else net.behind(0, 1) - 1)

    for size in (step.rows * 4, step.state):
        _around(total, size / p, 2 * (p - 1), hops=hops)
    total.merge(2, step.state)
    return total, 2 * step.state


def _allgather(net: Network, step: Step) -> tuple[_Sum, int]:
    total = _Sum(net)
    if net.direct:
        _all_to_all(total, step.state)
    else:
        _around(total, step.state, net.world - 1, hops=lambda level, n: n)
    total.merge(net.world, step.state)
    return total, net.world * step.state


@lru_cache(maxsize=64)
def _doubling_steps(net: Network, stride: int) -> tuple[dict[int, tuple[int, int]], ...]:
    """Recursive doubling among positions 0, stride, 2 stride, ...; the rest beyond a power of two folds in first.

    By step: for each level the messages, and how many of them share the busiest port.
    """
    n = net.world // stride
    core = 1 << (n.bit_length() - 1)
    fold = [(core + i, i) for i in range(n - core)]
    middle = [[(x, x ^ (1 << bit)) for x in range(core)] for bit in range(core.bit_length() - 1)]
    back = [(y, x) for x, y in fold]
    found = []
    for pairs in (fold, *middle, back):
        ports, used = Counter(), Counter()
        for x, y in pairs:
            level = net.level(x * stride, y * stride)
            used[level] += 1
            if level:
                for way, at in (("out", x), ("in", y)):
                    ports[level, way, net.units[at * stride][level - 1]] += 1
        if pairs:
            busiest = {level: max((m for (i, *_), m in ports.items() if i == level), default=1) for level in used}
            found.append({level: (m, busiest[level]) for level, m in used.items()})
    return tuple(found)


def _doubling(total: _Sum, stride: int, state: int) -> int:
    """Exchange states by recursive doubling; returns how many states a rank holds at most."""
    net = total.net
    for step in _doubling_steps(net, stride):
        active = sum(messages for messages, _ in step.values())
        phases = [Phase(level, 1, state, sharers) for level, (_, sharers) in step.items()]
        time = max(net.time([phase], active=active) for phase in phases)
        sent = [step.get(level, (0, 0))[0] * state / net.world for level in range(len(total.sent))]
        total.add(time, sent)
        total.merge(2, state)
    return (net.world // stride - 1).bit_length() + 1


def _butterfly(net: Network, step: Step) -> tuple[_Sum, int]:
    total = _Sum(net)
    kept = _doubling(total, 1, step.state)
    return total, kept * step.state


def _scatter(net: Network, step: Step) -> tuple[_Sum, int]:
    """Rows split over the ranks; each merges its own and sends the result to all."""
    total = _Sum(net)
    share = -(-step.rows // net.world) * step.row_bytes
    _all_to_all(total, share)
    total.merge(net.world, share)
    if net.direct:
        _all_to_all(total, share)
    else:
        _around(total, share, net.world - 1, hops=lambda level, n: n)
    return total, 2 * net.world * share


def _two_level(net: Network, step: Step, across: str) -> tuple[_Sum, int]:
    if net.block == 1:  # nothing to nest: every rank is a leader
        return _allgather(net, step)
    total, state, n, r = _Sum(net), step.state, net.nodes, net.block
    inside = net.count(0, range(r))
    if not net.direct:  # all ranks of a node take part in both all-gathers, each with its like in the other nodes
        for counts, size in ((inside, r), (Counter({net.top: n - 1}), n)):
            if size > 1:
                stage = [Phase(i, m, m * state, net.behind(0, i), m) for i, m in counts.items()]
                total.add(net.time(stage, 1), [counts[i] * state for i in range(len(total.sent))])
            total.merge(size, state)
        return total, (r + n) * state
    to_leader = (
        net.time([Phase(i, m, m * state) for i, m in inside.items()], active=n),
        [m * state / r for m in (inside[i] for i in range(len(total.sent)))],
    )
    total.add(*to_leader)
    total.merge(r, state)
    kept = n
    if across == "butterfly":
        kept = _doubling(total, r, state)
    else:
        counts = net.count(0, range(0, net.world, r))
        stage = [Phase(i, m, m * state) for i, m in counts.items()]
        total.add(net.time(stage, active=n), [counts[i] * state / r for i in range(len(total.sent))])
        total.merge(n, state)
    total.add(*to_leader)
    return total, (r + kept) * state


def _ring(net: Network, step: Step) -> tuple[float, list[float], int, int]:
    """The baseline: KV goes round, each shift under the attention of the shard at hand."""
    compute, p = step.kv_bytes / net.topology.memory_bandwidth, net.world
    shift, each = net.shift([step.kv_bytes])
    return (p - 1) * max(shift, compute) + compute, [(p - 1) * n for n in each], p - 1, 2 * step.kv_bytes


def reductions(net: Network, step: Step) -> list[Reduction]:
    """Every schedule with its predicted cost, the simpler ones first."""
    compute = step.kv_bytes / net.topology.memory_bandwidth
    ready = net.topology.levels[net.top].latency_s if net.direct and net.world > 1 else 0.0
    start = max(compute, ready)  # meanwhile the receivers say that they are ready
    found = [
        ("allgather", "direct", _allgather),
        ("butterfly", "direct", _butterfly),
        ("scatter", "direct", _scatter),
        ("two_level", "direct", partial(_two_level, across="direct")),
        ("two_level", "butterfly", partial(_two_level, across="butterfly")),
        ("allreduce", "direct", _allreduce),
    ]
    costs = []
    for schedule, across, take in found:
        if across == "butterfly" and not (net.direct and net.block > 1 and net.nodes > 2):
            continue
        total, peak = take(net, step) if net.world > 1 else (_Sum(net), 0)
        costs.append((schedule, across, start + total.time, compute, total.sent, total.steps, peak))
    time, sent, steps, peak = _ring(net, step)
    costs.append(("ring", "direct", time, net.world * compute, sent, steps, peak if net.world > 1 else 0))
    return [
        Reduction(
            schedule=schedule,
            across=across,
            cost=Cost(time_s=time, compute_s=busy, bytes_per_level=tuple(sent), steps=steps, peak_bytes=round(peak)),
        )
        for schedule, across, time, busy, sent, steps, peak in costs
    ]
