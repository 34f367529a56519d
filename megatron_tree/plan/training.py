"""The predicted cost of one forward or backward on a grid of ranks, and of the ring it is compared with.

Position n * block + l is rank l of node n. The grid is nested: (a0, b0) cells inside a node, (a / a0, b / b0) nodes.
A team (a row or a column) is therefore outer x inner positions. A gather over it first goes across (outer - 1 shares
to outer peers), then inside (outer shares to each of inner - 1 peers); a reduce-scatter goes the other way round.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from .cost import Network, Phase, pipeline
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


class Call(NamedTuple):
    """Sizes of one attention call, of one rank's share in bytes."""

    q: int
    o: int
    statistic: int
    kv: int
    flops: float
    """Of one rank, forward."""
    widening: float
    """How much larger than what travels the kernels' results are, which are fp32."""

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
    ) -> Call:
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
        """A rank's attention: two matrix products forward, five backward."""
        return self.flops * (2.5 if backward else 1) / topology.flops


class Team(NamedTuple):
    """The row or the column of one position: its peers over each level, as (level, peers, ranks behind the port)."""

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
def teams(net: Network, grid: tuple[int, int], inner: tuple[int, int]) -> tuple[tuple[Team, Team, float], ...]:
    """(row, column, share of the ranks that see this picture) on a nested grid."""
    (a, b), (a0, b0) = grid, inner
    a1, b1 = a // a0, b // b0

    def team(x: int, outer: int, inner: int, nodes, cells) -> Team:
        node = x // net.block
        if net.block > 1:  # other nodes are in other units just below the top level
            across = {net.top: outer - 1} if outer > 1 else {}
        else:
            across = net.count(x, nodes)
        if net.top > 1 and inner > 1:
            inside = net.count(x, (node * net.block + c for c in cells))
        else:
            inside = {0: inner - 1} if inner > 1 else {}
        port = [tuple((i, n, net.behind(x, i)) for i, n in sorted(found.items())) for found in (across, inside)]
        return Team(outer, inner, *port)

    found = Counter()
    for x in net.probes:
        node, l = divmod(x, net.block)
        (i1, j1), (i0, j0) = divmod(node, b1), divmod(l, b0)
        row = team(x, b1, b0, (i1 * b1 + j for j in range(b1)), (i0 * b0 + j for j in range(b0)))
        column = team(x, a1, a0, (i * b1 + j1 for i in range(a1)), (i * b0 + j0 for i in range(a0)))
        found[row, column] += 1
    return tuple((*pair, n / len(net.probes)) for pair, n in found.items())


def _stage_seconds(net: Network, collectives: list[list[tuple[tuple, float]]], *, gather: bool) -> list[float]:
    """Seconds of the stages of some collectives (row's and column's) of one rank.

    With direct exchanges all collectives start together, stage by stage. Built-in ones follow one another on a stream;
    an all-gather passes shares from rank to rank, so that its latencies add up.
    """
    if net.direct:
        stages = [[part[i] for part in collectives if i < len(part)] for i in range(2)]
    else:
        stages = [[stage] for part in collectives for stage in part]
    times = []
    for n, parts in enumerate(stages):
        phases: dict[int, Phase] = {}
        for peers, share in parts:
            for level, count, sharers in peers:
                _, messages, size, *_ = phases.get(level, Phase(level, 0, 0.0))
                hops = count if gather and not net.direct else 1
                phases[level] = Phase(level, messages + count, size + count * share, sharers, hops)
        if phases:
            posted = gather and n > 0  # a gather's second stage is announced with the first one
            times.append(net.time(phases.values(), None if net.direct else 1, posted=posted))
    return times if net.direct else [sum(times)]


def _grid_buffers(call: Call, grid: tuple[int, int], groups: int, backward: bool) -> float:
    """Bytes of gathered, partial and received tensors, and of the kernels' results."""
    a, b = grid
    if a == b == 1:
        return 0.0
    (down, up), (along, back) = call.column(backward), call.row(backward)
    queries, keys = (call.q, call.kv) if backward else (call.o, 0)  # what a share's queries and keys result in
    column, row = a > 1, b > 1
    gathered = a * down * column + b * along * row
    partial = a * up * column + b * back * row
    results = a * queries * column + queries * row + b * keys * (row + (row and column))
    alive = min(groups, 2) / groups
    return alive * (gathered + partial) + partial / groups + (results / groups + queries + keys) * call.widening


def grid_plan(
    net: Network, call: Call, grid: tuple[int, int], inner: tuple[int, int], groups: int, backward: bool
) -> PassPlan:
    """One pass on a nested grid, pipelined over head groups."""
    (down, up), (along, back) = call.column(backward), call.row(backward)
    sent = [0.0] * len(net.topology.levels)
    times, steps = [], 0
    compute = call.seconds(net.topology, backward)
    own = compute / net.world
    launch = net.topology.overhead_s if net.world > 1 else 0.0
    for row, column, part in teams(net, grid, inner):
        gathers = [row.stages(along / groups, reduce=False), column.stages(down / groups, reduce=False)]
        reduces = [column.stages(up / groups, reduce=True), row.stages(back / groups, reduce=True)]
        gather = _stage_seconds(net, gathers, gather=True)
        reduce = _stage_seconds(net, reduces, gather=False)
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
        peak_bytes=round(_grid_buffers(call, grid, groups, backward)),
    )
    return PassPlan(schedule="grid", grid=grid, inner=inner, head_groups=groups, cost=cost)


def ring_plan(net: Network, call: Call, backward: bool) -> PassPlan:
    """One pass of the ring at its best: each shift runs while the share at hand is computed."""
    p, compute = net.world, call.seconds(net.topology, backward)
    shifted = [call.kv, call.kv] if backward else [call.kv]
    results = call.q + call.kv if backward else call.o  # the sum and this step's part
    step, each = net.shift(shifted)
    time = (p - 1) * max(step, compute / p) + compute / p
    sent = [(p - 1) * n for n in each]
    if backward and p > 1:  # the gradient of KV goes one hop further than KV: home
        home, last = net.shift([call.kv])
        time += home
        sent = [m + n for m, n in zip(sent, last)]
    cost = Cost(
        time_s=time,
        compute_s=compute,
        bytes_per_level=tuple(sent),
        steps=(p - 1) + (backward and p > 1),
        peak_bytes=round(2 * (sum(shifted) + results * call.widening)) if p > 1 else 0,
    )
    return PassPlan(schedule="ring", grid=(1, p), inner=(1, net.block), head_groups=1, cost=cost)
