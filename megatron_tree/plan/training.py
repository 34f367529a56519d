"""The predicted cost of one forward or backward on a grid of ranks, and of the ring it is compared with.

Position n * block + l is rank l of node n. The grid is nested: (a0, b0) cells inside a node, (a / a0, b / b0) nodes.
A row or a column is therefore outer x inner positions. A gather over it first goes across nodes (one share to each of
outer - 1 peers), then inside the node (outer shares to each of inner - 1 peers); a reduce-scatter runs in reverse.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from .cost import Phase, PlacedTopology, pipeline
from .plans import Cost, PassPlan, Shape
from .topology import Topology

STATISTIC = 4  # bytes of lse or delta of one query and head


def forward_words(grid: tuple[int, int], shape: Shape) -> int:
    """Words per token of a share that a rank sends forward: (a-1)(|Q| + |O| + lse) + (b-1)(|K| + |V|)."""
    a, b = grid
    h, h_kv, d, d_v = shape
    return (a - 1) * h * (d + d_v + 1) + (b - 1) * h_kv * (d + d_v)


def backward_words(grid: tuple[int, int], shape: Shape) -> int:
    """The same backward: down the column q, dout, lse, delta and then dq; along the row k, v and then dk, dv."""
    a, b = grid
    h, h_kv, d, d_v = shape
    return (a - 1) * h * (2 * d + d_v + 2) + (b - 1) * h_kv * 2 * (d + d_v)


class CallSizes(NamedTuple):
    """Bytes of one rank's share of an attention call, and its compute."""

    q: int
    o: int
    statistic: int
    kv: int
    flops: float
    """Floating-point operations of one rank's forward."""
    widening: float
    """Bytes of the kernels' fp32 results per byte of what travels."""

    @classmethod
    def of(
        cls,
        world: int,
        shape: Shape,
        *,
        batch: int,
        seq_len: int,
        bytes_per_word: int,
        causal: bool,
        seq_len_kv: int | None = None,
        visible: float = 1.0,
    ) -> CallSizes:
        h, h_kv, d, d_v = shape
        seq_len_kv = seq_len if seq_len_kv is None else seq_len_kv
        tokens, tokens_kv = (batch * -(-s // world) for s in (seq_len, seq_len_kv))
        pairs = visible * tokens * seq_len_kv * h / (2 if causal else 1)
        return cls(
            q=tokens * h * d * bytes_per_word,
            o=tokens * h * d_v * bytes_per_word,
            statistic=tokens * h * STATISTIC,
            kv=tokens_kv * h_kv * (d + d_v) * bytes_per_word,
            flops=2 * pairs * (d + d_v),
            widening=max(1.0, 4 / bytes_per_word),
        )

    def column(self, backward: bool) -> tuple[int, int]:
        """(gathered, reduced) bytes of a share that go down the column."""
        return (self.q + self.o + 2 * self.statistic, self.q) if backward else (self.q, self.o + self.statistic)

    def row(self, backward: bool) -> tuple[int, int]:
        """(gathered, reduced) bytes of a share that go along the row."""
        return self.kv, self.kv if backward else 0

    def seconds(self, topology: Topology, backward: bool) -> float:
        """Seconds of a rank's attention: two matrix products forward, five backward."""
        return self.flops * (2.5 if backward else 1) / topology.flops


class Peers(NamedTuple):
    """Whom one position exchanges with in its row or its column, by level: (level, peers, ranks behind the port)."""

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


@lru_cache(maxsize=4096)
def peers_of(
    placed: PlacedTopology, grid: tuple[int, int], inner: tuple[int, int]
) -> tuple[tuple[Peers, Peers, float], ...]:
    """(row, column, fraction of the ranks that have these peers) on a nested grid."""
    (a, b), (a0, b0) = grid, inner
    a1, b1 = a // a0, b // b0

    def peers_at(x: int, outer: int, inner: int, nodes, cells) -> Peers:
        node = x // placed.block
        if placed.block > 1:  # other nodes are in other units just below the top level
            across = {placed.top: outer - 1} if outer > 1 else {}
        else:
            across = placed.count(x, nodes)
        if placed.top > 1 and inner > 1:
            inside = placed.count(x, (node * placed.block + c for c in cells))
        else:
            inside = {0: inner - 1} if inner > 1 else {}
        port = [tuple((i, n, placed.behind(x, i)) for i, n in sorted(found.items())) for found in (across, inside)]
        return Peers(outer, inner, *port)

    found = Counter()
    for x in placed.probes:
        node, l = divmod(x, placed.block)
        (i1, j1), (i0, j0) = divmod(node, b1), divmod(l, b0)
        row = peers_at(x, b1, b0, (i1 * b1 + j for j in range(b1)), (i0 * b0 + j for j in range(b0)))
        column = peers_at(x, a1, a0, (i * b1 + j1 for i in range(a1)), (i * b0 + j0 for i in range(a0)))
        found[row, column] += 1
    return tuple((*pair, n / len(placed.probes)) for pair, n in found.items())


def _stage_seconds(
    placed: PlacedTopology, collectives: list[list[tuple[tuple, float]]], *, gather: bool
) -> list[float]:
    """Seconds of the stages of some collectives (row's and column's) of one rank.

    With the direct transport all collectives start together, stage by stage. Built-in collectives run one after another
    on a stream; an all-gather passes shares from rank to rank, so its latencies add up.
    """
    if placed.direct:
        stages = [[part[i] for part in collectives if i < len(part)] for i in range(2)]
    else:
        stages = [[stage] for part in collectives for stage in part]
    times = []
    for n, parts in enumerate(stages):
        phases: dict[int, Phase] = {}
        for peers, share in parts:
            for level, count, sharers in peers:
                _, messages, size, *_ = phases.get(level, Phase(level, 0, 0.0))
                hops = count if gather and not placed.direct else 1
                phases[level] = Phase(level, messages + count, size + count * share, sharers, hops)
        if phases:
            posted = gather and n > 0  # receives of a gather's second stage are posted with the first
            times.append(placed.time(phases.values(), None if placed.direct else 1, posted=posted))
    return times if placed.direct else [sum(times)]


def _grid_buffers(sizes: CallSizes, grid: tuple[int, int], groups: int, backward: bool) -> float:
    """Bytes of gathered, partial and received tensors, and of the kernels' results."""
    a, b = grid
    if a == b == 1:
        return 0.0
    (down, up), (along, back) = sizes.column(backward), sizes.row(backward)
    queries, keys = (
        (sizes.q, sizes.kv) if backward else (sizes.o, 0)
    )  # bytes of the results per share of queries, of keys
    column, row = a > 1, b > 1
    gathered = a * down * column + b * along * row
    partial = a * up * column + b * back * row
    results = a * queries * column + queries * row + b * keys * (row + (row and column))
    alive = min(groups, 2) / groups
    return alive * (gathered + partial) + partial / groups + (results / groups + queries + keys) * sizes.widening


def grid_plan(
    placed: PlacedTopology, sizes: CallSizes, grid: tuple[int, int], inner: tuple[int, int], groups: int, backward: bool
) -> PassPlan:
    """One pass on a nested grid, pipelined over head groups."""
    (down, up), (along, back) = sizes.column(backward), sizes.row(backward)
    sent = [0.0] * len(placed.topology.levels)
    times, steps = [], 0
    compute = sizes.seconds(placed.topology, backward)
    own = compute / placed.world
    launch = placed.topology.overhead_s if placed.world > 1 else 0.0
    for row, column, part in peers_of(placed, grid, inner):
        gathers = [row.stages(along / groups, reduce=False), column.stages(down / groups, reduce=False)]
        reduces = [column.stages(up / groups, reduce=True), row.stages(back / groups, reduce=True)]
        gather = _stage_seconds(placed, gathers, gather=True)
        reduce = _stage_seconds(placed, reduces, gather=False)
        times.append(pipeline(groups, gather, own, (compute - own) / groups + launch, reduce))
        steps = max(steps, max(map(len, gathers)) + max(map(len, reduces)))
        for peers, share in (stage for collective in gathers + reduces for stage in collective):
            for level, n, _ in peers:
                sent[level] += part * groups * n * share
    cost = Cost(
        time_s=max(times),
        compute_s=compute,
        bytes_per_level=tuple(sent),
        steps=groups * steps,
        peak_bytes=round(_grid_buffers(sizes, grid, groups, backward)),
    )
    return PassPlan(schedule="grid", grid=grid, inner=inner, head_groups=groups, cost=cost)


def ring_plan(placed: PlacedTopology, sizes: CallSizes, backward: bool) -> PassPlan:
    """One pass of a fully overlapped ring: each shift runs while the current share is computed."""
    p, compute = placed.world, sizes.seconds(placed.topology, backward)
    shifted = [sizes.kv, sizes.kv] if backward else [sizes.kv]
    results = sizes.q + sizes.kv if backward else sizes.o  # the running sum and this step's part
    step, each = placed.shift(shifted)
    time = (p - 1) * max(step, compute / p) + compute / p
    sent = [(p - 1) * n for n in each]
    if backward and p > 1:  # the gradient of KV goes one hop further than KV: home
        home, last = placed.shift([sizes.kv])
        time += home
        sent = [m + n for m, n in zip(sent, last)]
    cost = Cost(
        time_s=time,
        compute_s=compute,
        bytes_per_level=tuple(sent),
        steps=(p - 1) + (backward and p > 1),
        peak_bytes=round(2 * (sum(shifted) + results * sizes.widening)) if p > 1 else 0,
    )
    return PassPlan(schedule="ring", grid=(1, p), inner=(1, placed.block), head_groups=1, cost=cost)
