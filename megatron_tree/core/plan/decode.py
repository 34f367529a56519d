"""The predicted cost of one decode step: a rank's attention over its shard, then one reduction of the partial states.

A state is rows x (d_v + 1) fp32. Receives are posted before the local attention, so an exchange takes one latency.

`plan_select`: how the ranks find the k best keys of every query. They merge lists of k entries of 8 bytes, as partial
results, or find the k-th score ("counts"): every round counts the keys by the next bits of their scores' 32, in so many
words of 4 bytes, and sums that over the ranks. More bits a round are fewer rounds, of more bytes. Of p ranks one sends,
for each query,

    allgather    8 k (p - 1)                  butterfly    8 k log2 p
    scatter      16 k (p - 1) / p             counts       4 * 2^bits * ceil(32 / bits), times p - 1 or 2 (p - 1) / p

bytes; counts of as many rounds again follow if more keys have the k-th score than are selected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from ..config import SELECT_SCHEDULES, check_choice
from ..units import format_bytes, format_seconds
from .choice import choose
from .cost import Phase, PlacedTopology, placed_topology
from .plans import Cost, DecodePlan, ReductionPlan
from .topology import Placement, Topology

SHARED_S = 1e-5  # a round through shared memory, the calls included; ranks that have cores meet in 3 to 10 us
PEERS_S = 8e-6  # a merge that reads the states of other GPUs: an estimate, three launches that wait for one another
PEERS_BYTES = 1 << 22  # of a state that is read so, at most
SMALL_SUM = 1 << 16  # bytes of a tensor that a sum over ranks sends whole, in one round (`comm.Ranks.sum`)
GLOO_LATENCIES = 1.7  # per round of gloo's all-reduce, measured; two of its messages are in flight at a time


class StepSizes(NamedTuple):
    """Sizes of one decode step in bytes."""

    rows: int
    row_bytes: int
    kv_bytes: int

    @property
    def state(self) -> int:
        return self.rows * self.row_bytes


class Rounds:
    """Accumulates the cost of rounds of messages that follow one another."""

    def __init__(self, placed: PlacedTopology):
        self.placed, self.time, self.sent, self.steps = placed, 0.0, [0.0] * len(placed.topology.levels), 0

    def add(self, time: float, sent: list[float], steps: int = 1):
        self.time += time
        self.sent = [m + n for m, n in zip(self.sent, sent)]
        self.steps += steps

    def merge(self, states: float, state_bytes: float):
        """Add reading `states` states from memory to merge them."""
        self.time += states * state_bytes / self.placed.topology.memory_bandwidth


def add_exchange(total: Rounds, share: float) -> None:
    """Every rank sends a share to every other at once; through shared memory it reads as many."""
    placed = total.placed
    if placed.shared:
        read = (placed.world - 1) * share
        total.add(SHARED_S + read / placed.topology.memory_bandwidth, [read, *[0.0] * (len(total.sent) - 1)])
        return
    total.add(*placed.exchange(placed.everyone, share, None if placed.direct else 1))


def _read_peers(total: Rounds, share: float) -> None:
    """Every rank reads a share of every other's state, over the innermost links."""
    read = (total.placed.world - 1) * share
    time = PEERS_S + read / total.placed.topology.levels[0].bandwidth
    total.add(time, [read, *[0.0] * (len(total.sent) - 1)])


def add_gather(total: Rounds, share: float) -> None:
    """Every rank gets every other's share."""
    if total.placed.direct:
        add_exchange(total, share)
    else:
        cheapest = min(total.placed.hops)  # of the ring's p hops, p - 1 add up
        _around(total, share, total.placed.world - 1, hops=lambda level, n: n - (level == cheapest))


def _around(total: Rounds, share: float, rounds: int, *, hops: Callable[[int, int], int]) -> None:
    """A built-in collective that passes `rounds` shares along a ring through all ranks.

    `hops(level, hops of the ring at that level)` is its number of latencies. gloo waits for the slowest hop in every
    round, and usually for the receiver to be ready. Other backends forward without waiting and use all ports of a unit.
    """
    placed = total.placed
    p, levels = placed.world, placed.topology.levels
    sent = [placed.hops[i] / p * rounds * share for i in range(len(levels))]
    if placed.direct:
        slowest = max(levels[i].latency_s for i in placed.hops)
        flow = max(share / levels[i].bandwidth for i in placed.hops)
        total.add(rounds * (GLOO_LATENCIES * slowest + flow), sent)
        return
    latency = sum(hops(i, n) * levels[i].latency_s for i, n in placed.hops.items())
    behind = {i: placed.behind(0, i) for i in placed.hops}
    stage = [Phase(i, 1, rounds * share / n, sharers=n, hops=0) for i, n in behind.items()]
    total.add(latency + placed.time(stage, 1), sent)


def _all_reduce(total: Rounds, size: float) -> None:
    placed, p = total.placed, total.placed.world

    def hops(level: int, n: int) -> int:  # up and down a chain inside the innermost units and a tree of units
        return 2 * ((len(placed.population[level - 1]) - 1).bit_length() if level else placed.behind(0, 1) - 1)

    _around(total, size / p, 2 * (p - 1), hops=hops)


def _reads_peers(placed: PlacedTopology, step: StepSizes) -> bool:
    return placed.reads_peers and step.state <= PEERS_BYTES


def _allreduce(placed: PlacedTopology, step: StepSizes) -> tuple[Rounds, int]:
    """The paper's Algorithm 3: MAX of lse, then SUM of packed numerators and denominators."""
    total = Rounds(placed)
    for size in (step.rows * 4, step.state):
        _all_reduce(total, size)
    total.merge(2, step.state)
    return total, 2 * step.state


def _allgather(placed: PlacedTopology, step: StepSizes) -> tuple[Rounds, int]:
    total = Rounds(placed)
    (_read_peers if _reads_peers(placed, step) else add_gather)(total, step.state)
    total.merge(placed.world, step.state)
    return total, placed.world * step.state


@lru_cache(maxsize=64)
def _doubling_steps(placed: PlacedTopology, stride: int) -> tuple[dict[int, tuple[int, int]], ...]:
    """Recursive doubling among positions 0, stride, 2 stride, ...; ranks beyond a power of two fold in first.

    Returns for each step: {level: (number of messages, number of them that share the busiest port)}.
    """
    n = placed.world // stride
    core = 1 << (n.bit_length() - 1)
    fold = [(core + i, i) for i in range(n - core)]
    middle = [[(x, x ^ (1 << bit)) for x in range(core)] for bit in range(core.bit_length() - 1)]
    back = [(y, x) for x, y in fold]
    steps = []
    for pairs in (fold, *middle, back):
        ports, used = Counter(), Counter()
        for x, y in pairs:
            level = placed.level(x * stride, y * stride)
            used[level] += 1
            if level:
                for way, at in (("out", x), ("in", y)):
                    ports[level, way, placed.units[at * stride][level - 1]] += 1
        if pairs:
            busiest = {level: max((m for (i, *_), m in ports.items() if i == level), default=1) for level in used}
            steps.append({level: (m, busiest[level]) for level, m in used.items()})
    return tuple(steps)


def _doubling(total: Rounds, stride: int, state: int) -> int:
    """Exchange states by recursive doubling; returns the largest number of states that a rank holds."""
    placed = total.placed
    for step in _doubling_steps(placed, stride):
        active = sum(messages for messages, _ in step.values())
        phases = [Phase(level, 1, state, sharers) for level, (_, sharers) in step.items()]
        time = max(placed.time([phase], active=active) for phase in phases)
        sent = [step.get(level, (0, 0))[0] * state / placed.world for level in range(len(total.sent))]
        total.add(time, sent)
        total.merge(2, state)
    return (placed.world // stride - 1).bit_length() + 1


def _butterfly(placed: PlacedTopology, step: StepSizes) -> tuple[Rounds, int]:
    total = Rounds(placed)
    kept = _doubling(total, 1, step.state)
    return total, kept * step.state


def _scatter(placed: PlacedTopology, step: StepSizes, local_heads: bool) -> tuple[Rounds, int]:
    """Rows split over the ranks; each merges its own and sends the result to all, or keeps it if it has its heads."""
    total = Rounds(placed)
    share = -(-step.rows // placed.world) * step.row_bytes
    (_read_peers if local_heads and _reads_peers(placed, step) else add_exchange)(total, share)
    total.merge(placed.world, share)
    if local_heads:
        return total, placed.world * share
    add_gather(total, share)
    return total, 2 * placed.world * share


def _two_level(placed: PlacedTopology, step: StepSizes, across: str) -> tuple[Rounds, int]:
    if placed.block == 1:  # nothing to nest: every rank is a leader
        return _allgather(placed, step)
    total, state, n, r = Rounds(placed), step.state, placed.nodes, placed.block
    inside = placed.count(0, range(r))
    if not placed.direct:  # an all-gather inside the node, then one among ranks of the same place in their nodes
        for counts, size in ((inside, r), (Counter({placed.top: n - 1}), n)):
            if size > 1:
                stage = [Phase(i, m, m * state, placed.behind(0, i), m) for i, m in counts.items()]
                total.add(placed.time(stage, 1), [counts[i] * state for i in range(len(total.sent))])
            total.merge(size, state)
        return total, (r + n) * state
    to_leader = (
        placed.time([Phase(i, m, m * state) for i, m in inside.items()], active=n),
        [m * state / r for m in (inside[i] for i in range(len(total.sent)))],
    )
    total.add(*to_leader)
    total.merge(r, state)
    kept = n
    if across == "butterfly":
        kept = _doubling(total, r, state)
    else:
        counts = placed.count(0, range(0, placed.world, r))
        stage = [Phase(i, m, m * state) for i, m in counts.items()]
        total.add(placed.time(stage, active=n), [counts[i] * state / r for i in range(len(total.sent))])
        total.merge(n, state)
    total.add(*to_leader)
    return total, (r + kept) * state


def _ring(placed: PlacedTopology, step: StepSizes) -> tuple[float, list[float], int, int]:
    """The baseline: KV travels round the ring, each shift overlapped with the attention over the current shard."""
    compute, p = step.kv_bytes / placed.topology.memory_bandwidth, placed.world
    shift, each = placed.shift([step.kv_bytes])
    return (p - 1) * max(shift, compute) + compute, [(p - 1) * n for n in each], p - 1, 2 * step.kv_bytes


def gathered(placed: PlacedTopology, share: float, *, exchanged: bool = False) -> tuple[float, float]:
    """(seconds, bytes that a rank sends) until every rank has every other's share of so many bytes.

    exchanged: by an all-to-all in which a rank sends its share to every other at once.
    """
    total = Rounds(placed)
    if placed.world > 1:
        (add_exchange if exchanged else add_gather)(total, share)
    return total.time, sum(total.sent)


def exchanges_queries(placed: PlacedTopology, share: float) -> bool:
    """Whether queries are gathered as fast by an all-to-all, which needs no padding, as by a built-in all-gather, whose
    latencies add up.

    share: bytes of a rank's queries. Other transports send to all ranks at once anyway.
    """
    at_once, around = gathered(placed, share, exchanged=True)[0], gathered(placed, share)[0]
    return not placed.direct and at_once <= (1 + 1e-9) * around  # equal for two ranks, but for rounding


def gathered_queries(placed: PlacedTopology, share: float) -> tuple[float, float]:
    """`gathered` for the queries of a decode step."""
    return gathered(placed, share, exchanged=exchanges_queries(placed, share))


def projects_first(placed: PlacedTopology, results: DecodePlan, projected: DecodePlan, more_bytes: float) -> bool:
    """Whether a decode step is faster if partial results are projected, head by head, before they are merged.

    results, projected: plans to merge either. more_bytes: of weights that a rank reads to project those of all heads,
    and not only its own results.
    """
    return projected.cost.time_s + more_bytes / placed.topology.memory_bandwidth < results.cost.time_s


def add_sum(total: Rounds, size: float) -> None:
    """Every rank gets the sum of all ranks' `size` bytes, as by `Ranks.sum`: of whole messages, or above `SMALL_SUM` of
    shares."""
    placed, share = total.placed, -(-size // total.placed.world)
    if not placed.direct:
        _all_reduce(total, size)
    elif placed.world == 2 or size <= SMALL_SUM:
        add_exchange(total, size)
        total.merge(placed.world, size)
    else:
        add_exchange(total, share)
        total.merge(placed.world, share)
        add_gather(total, share)


def reductions(placed: PlacedTopology, step: StepSizes, local_heads: bool = False) -> list[ReductionPlan]:
    """Every schedule with its predicted cost, the simpler ones first. local_heads: see `plan_decode`."""
    compute = step.kv_bytes / placed.topology.memory_bandwidth
    ready = placed.topology.levels[placed.top].latency_s if placed.direct and placed.world > 1 else 0.0
    start = max(compute, ready)  # receivers report that they are ready meanwhile
    schedules = [
        ("allgather", "direct", _allgather),
        ("butterfly", "direct", _butterfly),
        ("scatter", "direct", partial(_scatter, local_heads=local_heads)),
        ("two_level", "direct", partial(_two_level, across="direct")),
        ("two_level", "butterfly", partial(_two_level, across="butterfly")),
        ("allreduce", "direct", _allreduce),
    ]
    costs = []
    for schedule, across, take in schedules:
        if across == "butterfly" and not (placed.direct and placed.block > 1 and placed.nodes > 2):
            continue
        total, peak = take(placed, step) if placed.world > 1 else (Rounds(placed), 0)
        began = compute if placed.shared and schedule in ("allgather", "scatter") else start
        costs.append((schedule, across, began + total.time, compute, total.sent, total.steps, peak))
    time, sent, steps, peak = _ring(placed, step)
    costs.append(("ring", "direct", time, placed.world * compute, sent, steps, peak if placed.world > 1 else 0))
    return [
        ReductionPlan(
            schedule=schedule,
            across=across,
            cost=Cost(time_s=time, compute_s=busy, bytes_per_level=tuple(sent), steps=steps, peak_bytes=round(peak)),
        )
        for schedule, across, time, busy, sent, steps, peak in costs
    ]


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
