"""The predicted cost of one forward or backward on an arrangement of ranks, and of the ring it is compared with.

A team that gathers keys or queries has outer x inner positions. A gather first goes across nodes (one shard to each of
outer - 1 peers), then inside the node (outer shards to each of inner - 1 peers); a reduce-scatter runs in reverse. An
exchange of heads sends a part of a shard to each other rank of its team at once. In the cast every rank is sent only
the keys that its queries can see.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from ..layout import Sharding, by_document, visible_rows
from ..spec import MaskBounds
from .cost import PassClock, Phase, PlacedTopology, Stage, spread
from .plans import MERGE, MERGE_PACKED, Arrangement, CallSizes, Cost, HeadSplit, PassPlan
from .stages import Stages, run_stages


class Peers(NamedTuple):
    """Whom one position exchanges with in a team, by level: (level, peers, ranks behind the port)."""

    outer: int
    inner: int
    across: tuple[tuple[int, int, int], ...]
    inside: tuple[tuple[int, int, int], ...]

    def stages(self, share: float, *, reduce: bool) -> list[tuple[tuple, float]]:
        """(peers, bytes to each of them) of a gather's or a reduce-scatter's stages."""
        if not share:
            return []
        stages = [(self.across, share)] * (self.outer > 1) + [(self.inside, self.outer * share)] * (self.inner > 1)
        return stages[::-1] if reduce else stages


def _with_ports(placed: PlacedTopology, x: int, counts: dict) -> tuple[tuple[int, int, int], ...]:
    return tuple((i, n, placed.behind(x, i)) for i, n in sorted(counts.items()))


@lru_cache(maxsize=1 << 14)
def peers_of(placed: PlacedTopology, arrangement: Arrangement) -> tuple[tuple[int, Peers, Peers, float], ...]:
    """(position, key team, query team, fraction of the ranks that have these peers) of an arrangement."""
    (a1, b1), (a0, b0) = arrangement.outer, arrangement.inner

    def peers_at(x: int, outer: int, inner: int, positions) -> Peers:
        """positions(x): of the team, [place][node]."""
        closed = placed.block > 1 and placed.top == 1  # other nodes are over level 1, this one is level 0
        across = {placed.top: outer - 1} if outer > 1 else {}
        inside = {0: inner - 1} if inner > 1 else {}
        if not closed and max(outer, inner) > 1:
            places = positions(x)
            across = next(place for place in places if x in place)
            inside = [place[across.index(x)] for place in places]
            across, inside = placed.count(x, across), placed.count(x, inside)
        return Peers(outer, inner, _with_ports(placed, x, across), _with_ports(placed, x, inside))

    positions_of: dict[tuple[Peers, Peers], list[int]] = {}
    for x in placed.probes:
        keys = peers_at(x, b1, b0, arrangement.key_team_of)
        queries = peers_at(x, a1, a0, arrangement.query_team_of)
        positions_of.setdefault((keys, queries), []).append(x)
    return tuple((xs[0], *peers, len(xs) / len(placed.probes)) for peers, xs in positions_of.items())


def _stages(placed: PlacedTopology, collectives: list[list[tuple[tuple, float]]], lane: str) -> list[Stage]:
    """The stages of one rank's collectives (in its key team and its query team) that start together, for a `PassClock`.

    With the direct transport all collectives run at once, stage by stage. Built-in collectives run one after another on
    a stream, `lane`; an all-gather passes shares from rank to rank, so its latencies add up.
    """
    if placed.direct:
        stages = [[part[i] for part in collectives if i < len(part)] for i in range(2)]
    else:
        stages = [[stage] for part in collectives for stage in part]
    direct, builtin = [], []
    for n, parts in enumerate(stages):
        phases: dict[int, Phase] = {}
        for peers, share in parts:
            for level, count, sharers in peers:
                _, messages, size, *_ = phases.get(level, Phase(level, 0, 0.0))
                hops = count if lane == "gather" and not placed.direct else 1
                phases[level] = Phase(level, messages + count, size + count * share, sharers, hops)
        if phases and placed.direct:
            posted = lane == "gather" and n > 0  # receives of a gather's second stage are posted with the first
            direct.append(placed.stage(phases.values(), posted=posted))
        elif phases:
            builtin.append(placed.busy(phases.values(), 1))
    if not builtin:
        return direct
    levels = sorted({level for busy in builtin for level in busy})
    return [
        Stage(
            {lane: sum(max(busy.values()) for busy in builtin)}
            | {level: sum(busy.get(level, 0.0) for busy in builtin) for level in levels}
        )
    ]


def exchange_buffers(sizes: CallSizes, chunks: int, backward: bool) -> float:
    """Bytes sent and received by exchanges under way, and the joined tensors that stand beside their chunks."""
    before, after = sizes.exchanged(backward)
    return 2 * (min(chunks, 3) * before + min(chunks, 2) * after) / chunks + (after if backward else before + after)


def _grid_buffers(sizes: CallSizes, grid: tuple[int, int], chunks: int, backward: bool) -> float:
    """Bytes of gathered, partial and received tensors, and of the kernels' results."""
    a, b = grid
    if a == b == 1:
        return 0.0
    (down, up), (along, back) = sizes.in_query_team(backward), sizes.in_key_team(backward)
    queries, keys = (sizes.q, sizes.kv) if backward else (sizes.out, 0)  # bytes of the results per share of each
    moves_q, moves_kv = a > 1, b > 1
    gathered = a * down * moves_q + b * along * moves_kv
    partial = a * up * moves_q + b * back * moves_kv
    results = a * queries * moves_q + queries * moves_kv + b * keys * (moves_kv + (moves_kv and moves_q))
    alive = min(chunks, 2) / chunks
    return alive * (gathered + partial) + partial / chunks + (results / chunks + queries + keys) * sizes.widening


def exchanges(
    placed: PlacedTopology,
    arrangement: Arrangement,
    sizes: CallSizes,
    chunks: int,
    backward: bool,
    x: int,
    sent: list[float],
    part: float,
) -> tuple[list[Stage], list[Stage]]:
    """Stages of one chunk's exchange of heads before and after attention, at position x; adds `part` of all chunks'
    bytes to `sent`."""
    u = arrangement.u
    if u == 1:
        return [], []
    peers = _with_ports(placed, x, placed.count(x, arrangement.holder_of(x)))
    shares = [size / u for size in sizes.exchanged(backward)]
    for level, n, _ in peers:
        sent[level] += part * n * sum(shares)
    there, home = (_stages(placed, [[(peers, share / chunks)]], "exchange") for share in shares)
    return there, home


def grid_plan(
    placed: PlacedTopology,
    sizes: CallSizes,
    arrangement: Arrangement,
    split: HeadSplit,
    chunks: int,
    backward: bool,
    *,
    local_first: bool = True,
    schedule: str = "grid",
) -> PassPlan:
    """One pass on an arrangement, pipelined over head chunks.

    local_first: whether the local queries meet the local keys while the first chunk is gathered. On a grid of one row,
    schedule may be "gather": in the backward the key team gathers queries, too, and nothing is reduced; or "integers":
    gradients of keys are reduced in 4 bytes each, if no sum needs more.
    """
    u, (a, b) = arrangement.u, arrangement.grid
    sizes = sizes.split(split) if u > 1 else sizes
    (down, up), (along, back) = sizes.in_query_team(backward), sizes.in_key_team(backward)
    sent = [0.0] * len(placed.topology.levels)
    probes, steps = [], 0
    compute = sizes.seconds(placed.topology, backward)
    buffers = _grid_buffers(sizes, arrangement.grid, chunks, backward)
    if schedule in ("gather", "integers"):
        leaves = b * sizes.kv + sizes.q + 2 * sizes.o  # copies in fp32, and results twice
        if schedule == "integers":
            back *= sizes.widening
            leaves = b * 5 * sizes.kv + 3 * sizes.q + sizes.o
        elif backward:
            along, back = along + down, 0
            compute *= (7 - 2 / b) / 5  # three products for dq, four for dk and dv, both together five
            leaves = b * (3 * sizes.q + 5 * sizes.kv + sizes.o)
        buffers = (b * min(chunks, 2) * along * (b > 1) + leaves * sizes.widening) / chunks
    local_s = compute / (a * b) if local_first else 0.0
    rest_s = (compute - local_s + _copying(placed, sizes, arrangement.grid, backward, local_first)) / chunks
    rest_s += placed.topology.chunk_s if placed.world > 1 else 0.0
    for x, keys, queries, part in peers_of(placed, arrangement):
        gathers = [keys.stages(along / chunks, reduce=False), queries.stages(down / chunks, reduce=False)]
        reduces = [queries.stages(up / chunks, reduce=True), keys.stages(back / chunks, reduce=True)]
        there, home = exchanges(placed, arrangement, sizes, chunks, backward, x, sent, part)
        stages = (_stages(placed, gathers, "gather"), _stages(placed, reduces, "reduce"))
        probes.append([there, *stages, home])
        steps = max(steps, max(map(len, gathers)) + max(map(len, reduces)) + 2 * (u > 1))
        for peers, share in (stage for collective in gathers + reduces for stage in collective):
            for level, n, _ in peers:
                sent[level] += part * chunks * n * share
    packing = packing_seconds(placed, sizes, chunks, backward) if u > 1 else 0.0
    cost = Cost(
        time_s=seconds_of_pass(
            probes, chunks, local_s, rest_s, together=u == 1, packing=packing, streams=not placed.direct
        ),
        compute_s=compute,
        bytes_per_level=tuple(sent),
        steps=chunks * steps,
        peak_bytes=round(buffers + (exchange_buffers(sizes, chunks, backward) if u > 1 else 0)),
    )
    return PassPlan(schedule=schedule, arrangement=arrangement, head_chunks=chunks, cost=cost)


def _network_seconds(stages: list[list[Stage]]) -> float:
    return sum(stage.seconds for collective in stages for stage in collective)


def packing_seconds(placed: PlacedTopology, sizes: CallSizes, chunks: int, backward: bool) -> float:
    """Seconds in which a rank packs one chunk's heads for the exchange, and again those of its results: everything is
    read and written once before its exchange, and once after it. On a CPU both exchanges together cost as many calls
    as the chunk's attention."""
    copied = 2 * sum(sizes.exchanged(backward)) / chunks / placed.topology.memory_bandwidth
    return copied + (placed.topology.chunk_s / 2 if placed.direct else 0.0)


def _copying(
    placed: PlacedTopology, sizes: CallSizes, grid: tuple[int, int], backward: bool, local_first: bool
) -> float:
    """Seconds in which a CPU rank reads and writes what it sends, and merges what it reduces. On a GPU the streams of
    the collectives send, so what its kernels and merges read and write."""
    if not placed.direct:
        (a, b), twice = grid, local_first and grid[1] > 1  # local queries are in two calls
        merged = dict(merged=a - 1 + twice, merged_keys=b - 1)
        return sizes.beside_products(placed.topology, backward, calls=a + twice, **merged)
    (down, up), (along, back) = sizes.in_query_team(backward), sizes.in_key_team(backward)
    teams = ((n, 2 * sent + 3 * n * reduced) for n, sent, reduced in zip(grid, (down, along), (up, back)))
    moved = sum(num_bytes for n, num_bytes in teams if n > 1)
    return moved / placed.topology.memory_bandwidth


def seconds_of_pass(
    probes: list[list[list[Stage]]],
    chunks: int,
    local_s: float,
    rest_s: float,
    *,
    together: bool,
    packing: float = 0.0,
    streams: bool = False,
) -> float:
    """Seconds of a pass on the slowest of the probes.

    probes: for each, the stages of a chunk's exchange, gathers, reductions and exchange back. local_s, rest_s: seconds
    of attention on the local shard (all chunks), and on what is gathered (one chunk). together: whether the local
    shard is computed at once. packing: seconds of one chunk before its exchange, and again after it.
    streams: see `run_stages`.
    """
    clock, stages = PassClock(), max(probes, key=_network_seconds)
    local = [local_s * (i == 0) if together else local_s / chunks for i in range(chunks)]
    predicted = [_PredictedChunk(clock, stages, seconds, rest_s, packing) for seconds in local]
    run_stages(predicted, streams=streams)
    return clock.now


class _PredictedChunk(Stages):
    """A head chunk whose messages and computation take their predicted time."""

    def __init__(self, clock: PassClock, stages: list[list[Stage]], local: float, rest: float, packing: float):
        self.clock, self.local, self.rest, self.packing = clock, local, rest, packing
        self.there, self.gathers, self.reductions, self.home = stages

    def exchange(self) -> None:
        self.clock.compute(self.packing)
        self.sent = self.clock.start(self.there)

    def gather(self) -> None:
        self.clock.wait(self.sent)
        self.sent = self.clock.start(self.gathers)

    def receive(self) -> None:
        self.clock.compute(self.local)
        self.clock.wait(self.sent)

    def attend(self) -> None:
        self.clock.compute(self.rest)
        self.sent = self.clock.start(self.reductions)

    def advance(self) -> None:
        self.clock.advance(self.sent)

    def give_back(self) -> None:
        self.clock.wait(self.sent)
        self.clock.compute(self.packing)
        self.sent = self.clock.start(self.home)

    def collect(self) -> None:
        self.clock.wait(self.sent)


def ring_plan(
    placed: PlacedTopology, sizes: CallSizes, arrangement: Arrangement, split: HeadSplit, backward: bool
) -> PassPlan:
    """One pass of a fully overlapped ring: each shift runs while the current share is computed.

    With heads exchanged before and after: not overlapped, since the ring needs all of them.
    """
    u, n = arrangement.u, arrangement.grid[1]
    sizes = sizes.split(split) if u > 1 else sizes
    compute, hops = sizes.seconds(placed.topology, backward), _hops(placed, arrangement)
    shifted = [sizes.kv, sizes.kv] if backward else [sizes.kv]
    results = sizes.q + sizes.kv if backward else sizes.out  # the running sum and this step's part
    sharers = arrangement.heads[1]
    step, each = placed.shift(shifted, hops, sharers)
    local_s, sending = compute / n, 0.0
    if placed.direct:  # a step's seconds of compute that a CPU rank loses
        sending = placed.posting(len(shifted)) + sum(shifted) * placed.topology.byte_s
        merging = 3 * results / placed.topology.memory_bandwidth
    else:
        local_s += sizes.beside_products(placed.topology, backward, calls=1, merged=0, merged_keys=0)
        merge = MERGE_PACKED if sizes.packed else MERGE
        merging = sizes.beside_products(placed.topology, backward, calls=0, merged=1, merged_keys=1, merge=merge)
    other_s = local_s + merging + placed.topology.chunk_s  # a step is a chunk, except for that of the local shard
    time = local_s
    if n > 1:
        time = max(step, local_s + sending) + (n - 2) * max(step, other_s + sending) + other_s
    sent, steps = [(n - 1) * size for size in each], n - 1
    if backward and n > 1:  # the gradient of KV goes one hop further than KV: home
        home, last = placed.shift([sizes.kv], hops, sharers)
        time, steps = time + home, steps + 1
        sent = [m + n for m, n in zip(sent, last)]
    buffers = 2 * (sum(shifted) + results * sizes.widening) if n > 1 else 0
    if u > 1:
        for size in sizes.exchanged(backward):
            calls = None if placed.direct else 1
            exchange, more = placed.exchange(lambda x: placed.count(x, arrangement.holder_of(x)), size / u, calls)
            time, sent = time + exchange, [m + n for m, n in zip(sent, more)]
        time += 2 * packing_seconds(placed, sizes, 1, backward)
        steps, buffers = steps + 2, buffers + exchange_buffers(sizes, 1, backward)
    cost = Cost(time_s=time, compute_s=compute, bytes_per_level=tuple(sent), steps=steps, peak_bytes=round(buffers))
    return PassPlan(schedule="ring", arrangement=arrangement, head_chunks=1, cost=cost)


@lru_cache(maxsize=1 << 10)
def _hops(placed: PlacedTopology, arrangement: Arrangement) -> Counter:
    """How many hops of all rings go over each level."""
    if arrangement.u == 1:
        return placed.hops
    if arrangement.grid[1] == 1:
        return Counter()
    rings = {arrangement.places_of(x) for x in arrangement.holder_of(0)}
    return Counter(placed.level(x, y) for ring in rings for x, y in zip(ring, ring[1:] + ring[:1]))


class Mask(NamedTuple):
    """Which keys a query sees, and who holds them."""

    bounds: MaskBounds
    queries: Sharding
    keys: Sharding


class Flow(NamedTuple):
    """What one position sends and receives: rows and messages by level."""

    sent: Counter
    messages: Counter
    received: int
    returned: Counter
    """Rows whose gradients it sends back."""


@lru_cache(maxsize=256)
def flows(placed: PlacedTopology, arrangement: Arrangement, mask: Mask) -> tuple[tuple[int, Flow], ...]:
    """(position, its flow) of some positions."""
    order = placed.placement.order

    def segments(x: int) -> tuple:
        holder = tuple(order[y] for y in arrangement.holder_of(x))
        queries = by_document(mask.queries.segments(holder))
        return queries, queries if mask.keys == mask.queries else by_document(mask.keys.segments(holder))

    by_position, held = [], {}
    for x in spread(placed.world):  # who sends what differs even where all ranks have the same links
        places = arrangement.places_of(x)
        held |= {y: segments(y) for y in places if y not in held}
        sent, messages, returned = Counter(), Counter(), Counter()
        for y in (y for y in places if y != x):
            level = placed.level(x, y)
            to, back = (
                sum(s.length for s in visible_rows(held[q][0], held[k][1], mask.bounds)) for q, k in ((y, x), (x, y))
            )
            sent[level] += to
            returned[level] += back
            messages[level] += to > 0
        by_position.append((x, Flow(sent, messages, sum(returned.values()), returned)))
    return tuple(by_position)


def cast_plan(
    placed: PlacedTopology,
    sizes: CallSizes,
    arrangement: Arrangement,
    split: HeadSplit,
    chunks: int,
    backward: bool,
    mask: Mask,
) -> PassPlan:
    """One pass of the cast, pipelined over head chunks."""
    u = arrangement.u
    sizes = sizes.split(split) if u > 1 else sizes
    rows = max(1, mask.keys.rows)
    row_bytes = sizes.kv / u / rows  # of a KV row, with the heads of this rank
    compute = sizes.seconds(placed.topology, backward)
    local_s = compute / (arrangement.grid[0] * arrangement.grid[1])
    sent, probes, most = [0.0] * len(placed.topology.levels), [], 0
    by_position = flows(placed, arrangement, mask)
    part = 1 / len(by_position)
    for x, flow in by_position:
        there, home = exchanges(placed, arrangement, sizes, chunks, backward, x, sent, part)
        casts = []
        for moved in (flow.sent, flow.returned if backward else Counter()):
            phases = [
                Phase(i, flow.messages[i], n * row_bytes / chunks, placed.behind(x, i)) for i, n in moved.items() if n
            ]
            casts.append([_cast_stage(placed, phases)] if phases else [])
            for i, n in moved.items():
                sent[i] += part * n * row_bytes
        probes.append([there, casts[0], casts[1], home])
        most = max(most, flow.received)
    beside = 0.0
    if not placed.direct:
        merged = dict(merged=most > 0, merged_keys=most / rows)
        beside = sizes.beside_products(placed.topology, backward, calls=1 + (most > 0), **merged)
    rest_s = (compute - local_s + beside) / chunks + placed.topology.chunk_s
    alive = min(chunks, 2) / chunks
    buffers = most * row_bytes * (alive * (2 if backward else 1) + (sizes.widening / chunks if backward else 0))
    packing = packing_seconds(placed, sizes, chunks, backward) if u > 1 else 0.0
    cost = Cost(
        time_s=seconds_of_pass(
            probes, chunks, local_s, rest_s, together=u == 1, packing=packing, streams=not placed.direct
        ),
        compute_s=compute,
        bytes_per_level=tuple(sent),
        steps=chunks * (1 + backward + 2 * (u > 1)),
        peak_bytes=round(buffers + (exchange_buffers(sizes, chunks, backward) if u > 1 else 0)),
    )
    return PassPlan(schedule="cast", arrangement=arrangement, head_chunks=chunks, cost=cost)


def _cast_stage(placed: PlacedTopology, phases: list[Phase]) -> Stage:
    """A built-in exchange takes the stream of gathers."""
    if placed.direct:
        return placed.stage(phases, posted=False)
    busy = placed.busy(phases, 1, posted=False)
    return Stage(busy | {"gather": max(busy.values())})
