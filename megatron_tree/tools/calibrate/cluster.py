"""Turns timed messages and kernels into a topology: its levels with latency and bandwidths, the faster transport,
and the speed of a rank's attention while all ranks compute, as in a real step.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...core.comm.links import without_latency
from ...core.plan import Level, Topology
from . import compute
from .links import REPEATS, Links, Pair

_MAX_PAIRS = 4  # of one kind, measured one after another; the median counts
_BURST = 65
_FIRST_BYTES = 1 << 16
_MOST_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
_LONG_ENOUGH_S = 0.03  # for a large message: its latency is then negligible
_SMALL_STATE, _LARGE_SHARE = 1 << 13, 1 << 20  # bytes per rank: a decode state; a share of keys and values


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration."""

    topology: Topology
    table: tuple[tuple[str, str], ...]
    """(quantity, value with unit), for printing."""


def calibrate(
    device: torch.device,
    *,
    name: str,
    memory_bandwidth: float | None = None,
    flops: float | None = None,
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measure the ranks of the default group. Collective; every rank gets the same result.

    Args:
        name: the topology's.
        memory_bandwidth, flops: of local attention in bytes/s and flop/s; None: measured.
        timeout_s: time limit of every single wait in seconds.
        say: receives a line before each measurement.

    Raises: ValueError with fewer than two ranks, or if a message arrives corrupted. CommError if a rank is stuck.
    """
    links = Links(device, timeout_s)
    if links.world < 2:
        raise ValueError("calibrate: one rank has no links to measure: start at least two")
    hosts, backend = links.ranks.by_host, links.ranks.backend
    say(f"{links.world} ranks on {len(hosts)} hosts, {backend} on {device.type}")
    levels, overhead_s, table = _measure_levels(links, hosts, say)
    transport, wake_s, shared_s, chunk_s = "builtin", 0.0, 0.0, overhead_s  # a GPU's launches take about as long
    if backend == "gloo" and device.type == "cpu":
        transport = _faster_transport(links, hosts, table, say)
        say("decode reductions, all ranks at once")
        wake_s, shared_s = _measure_sharing(links, levels, hosts, overhead_s)
        table.append(("all ranks: wake up for a step", f"{wake_s * 1e6:.0f} us"))
        table.append(("all ranks: one message of any of them", f"{shared_s * 1e6:.0f} us"))
        say("attention in head chunks")
        chunk_s = compute.chunk_s(links, overhead_s)
    if memory_bandwidth is None:
        say("attention of one query (decode)")
        memory_bandwidth = links.median(compute.memory_bandwidth(device))
    byte_s = 0.0
    if flops is None:
        say("attention of a sequence (forward), alone and while messages are sent")
        flops, share, byte_s = compute.compute(links, levels[-1].bandwidth, max(map(len, hosts)))
        chunk_s /= share
    table += [
        ("one more head chunk", f"{chunk_s * 1e6:.0f} us"),
        ("compute lost for a MB sent", f"{byte_s * 1e12:.0f} us"),
        ("memory bandwidth in decode", f"{memory_bandwidth / 1e9:.3g} GB/s"),
        ("attention, forward", f"{flops / 1e12:.3g} TFLOP/s"),
        ("transport", transport),
    ]
    topology = Topology(
        name=name,
        levels=tuple(levels),
        host_size=max(map(len, hosts)),
        overhead_s=overhead_s,
        chunk_s=chunk_s,
        byte_s=byte_s,
        shared_overhead_s=shared_s,
        wake_s=wake_s,
        memory_bandwidth=memory_bandwidth,
        flops=flops,
        transport=transport,
    )
    return Calibration(topology, tuple(table))


def _measure_levels(links: Links, hosts: list[list[int]], say) -> tuple[list[Level], float, list[tuple[str, str]]]:
    """The levels inside a host and between hosts, as far as there are any; the seconds of one more message; the rows of
    the table."""
    host_size = max(map(len, hosts))
    inside = [(ranks[0], ranks[1]) for ranks in hosts if len(ranks) > 1][:_MAX_PAIRS]
    across = list(itertools.pairwise(hosts))[:_MAX_PAIRS]
    levels, overheads, table = [], [], []

    def add(name: str, size: int, latency_s: float, bandwidth: float, port: float, overhead_s: float) -> None:
        level = Level(name=name, size=size, latency_s=latency_s, bandwidth=bandwidth, port_bandwidth=port)
        levels.append(level)
        overheads.append(overhead_s)
        table.extend(
            (f"{name}: {what}", value)
            for what, value in (
                ("latency", f"{latency_s * 1e6:.0f} us"),
                ("bandwidth of one rank", f"{bandwidth / 1e9:.3g} GB/s"),
                ("bandwidth of a port", f"{port / 1e9:.3g} GB/s"),
                ("one more message", f"{overhead_s * 1e6:.0f} us"),
            )
        )

    if inside:
        say("inside a host")
        latency_s, bandwidth, overhead_s = _measure_pairs(links, inside)
        add("host", host_size if across else 0, latency_s, bandwidth, bandwidth, overhead_s)
    if across:
        say("between hosts")
        latency_s, bandwidth, overhead_s = _measure_pairs(links, [(a[0], b[0]) for a, b in across])
        say("between hosts, all ranks of a host at once")
        port = bandwidth if host_size == 1 else max(bandwidth, _measure_ports(links, across, bandwidth))
        add("network", 0, latency_s, bandwidth, port, overhead_s)
    return levels, max(overheads), table


def _faster_transport(links: Links, hosts: list[list[int]], table: list[tuple[str, str]], say) -> str:
    """Which of "direct" and "builtin" is faster, a small and a large all-gather together; two rows of the table."""
    flat, ratio = (tuple(range(links.world)),), 1.0
    nested = tuple(zip(*hosts)) if len(set(map(len, hosts))) == 1 else flat
    for num_bytes, ranks in ((_SMALL_STATE, flat), (_LARGE_SHARE, nested)):
        say(f"all-gather of {num_bytes >> 10} KiB from every rank, direct and built in")
        direct, builtin = (links.gather(ranks, num_bytes, kind) for kind in ("direct", "builtin"))
        ratio *= direct / builtin
        row = f"{direct * 1e3:.3g} ms direct, {builtin * 1e3:.3g} ms built in"
        table.append((f"all-gather, {num_bytes >> 10} KiB of each rank", row))
    return "direct" if ratio < 1 else "builtin"


def _measure_pairs(links: Links, pairs: list[Pair]) -> tuple[float, float, float]:
    """(latency in s, bandwidth in bytes/s, seconds per additional message) of a single pair: medians over the pairs."""
    num_bytes = _FIRST_BYTES
    while _alone(links, pairs[0], num_bytes) < _LONG_ENOUGH_S and num_bytes < _MOST_BYTES[links.device.type]:
        num_bytes *= 4
    measured = []
    for pair in pairs:
        small = _alone(links, pair)
        overhead_s = max(0.0, (_alone(links, pair, count=_BURST) - small) / (_BURST - 1))
        bandwidth = num_bytes / without_latency(_alone(links, pair, num_bytes), small)
        measured.append((max(small / 2 - overhead_s, small / 4), bandwidth, overhead_s))
    return tuple(map(statistics.median, zip(*measured)))


def _measure_sharing(links: Links, levels: list[Level], hosts: list[list[int]], overhead_s: float):
    """(seconds until a rank resumes after a message has arrived, seconds by which any message delays all ranks).

    The latter is 0 if every rank has its own core; with fewer cores than ranks messages wait for one another. An
    all-gather is one step of p (p - 1) messages, a butterfly log2(p) steps of p messages: two equations, two unknowns.
    """
    p, latency_s = links.world, levels[-1].latency_s
    host = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    core = 1 << (p.bit_length() - 1)
    steps = [
        levels[0].latency_s if all(host[r] == host[r ^ (1 << bit)] for r in range(core)) else latency_s
        for bit in range(core.bit_length() - 1)
    ]
    steps += [latency_s] * (2 * (p > core))
    gather = links.reduce("allgather", latency_s) - latency_s
    step = (links.reduce("butterfly", latency_s) - sum(steps)) / len(steps)
    shared_s = (gather - step) / (p * (p - 2)) if p > 2 else 0.0
    if p * shared_s < overhead_s:
        shared_s = 0.0
    return max(0.0, step - max(overhead_s, p * shared_s)), shared_s


def _alone(links: Links, pair: Pair, *args, **kwargs) -> float:
    return links.exchange([pair], *args, **kwargs)[pair].median


def _measure_ports(links: Links, across: list[tuple[list[int], list[int]]], bandwidth: float) -> float:
    """Bytes/s of a host's port, with all its ranks sending to another host at once: the median over pairs of hosts."""
    num_bytes = min(max(int(bandwidth * _LONG_ENOUGH_S), _FIRST_BYTES), _MOST_BYTES[links.device.type])
    rates = []
    for pair_of_hosts in across:
        pairs = list(zip(*pair_of_hosts))
        small = links.exchange(pairs).values()
        large = links.exchange(pairs, num_bytes).values()
        seconds = max(times.all for times in large)
        latency_s = REPEATS * min(times.median for times in small)
        rates.append(REPEATS * len(pairs) * num_bytes / without_latency(seconds, latency_s))
    return statistics.median(rates)
