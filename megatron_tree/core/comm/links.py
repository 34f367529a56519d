"""Latency and bandwidth between the ranks of a group, measured with a few messages.

Ranks form rings: each sends to the next one while it receives from the one before, again and again. So the slowest link
of a ring sets its pace, and all links carry messages in both directions, as in a collective.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..log import say_once
from ..units import format_bytes, format_seconds
from .collectives import GATHERS
from .work import Mail, Pending, start_shift

if TYPE_CHECKING:
    from .ranks import Ranks

SMALL, PROBE = 8, 1 << 16  # bytes of a message
MOST = {"cpu": 1 << 22, "cuda": 1 << 25}
LONG_S = 8e-3  # for a large message, or so many times a small one's:
LONG = 4
FEW, SEVERAL = 4, 8  # messages of one size; the last half count: connections are made before, and windows open

Ring = tuple[int, ...]


class Link(NamedTuple):
    """The slowest rank's figures."""

    seconds: float
    """Of a small message, with the CPU time that it takes."""
    bandwidth: float
    """Bytes/s of one rank of each host, in both directions at once."""
    port_bandwidth: float
    """Bytes/s of all ranks of a host together; inside a host that of one rank."""


class Links(NamedTuple):
    inside: Link | None
    """Among the ranks of one host, if there are several on any."""
    between: Link | None
    """Among hosts, if there are several."""

    def __str__(self) -> str:
        kinds = ("inside a host", self.inside), ("between hosts", self.between)
        return ", ".join(
            f"{format_seconds(link.seconds)} and {format_bytes(link.port_bandwidth)}/s {where}"
            for where, link in kinds
            if link
        )


def measured_links(ranks: Ranks) -> Links:
    """The links of a group, measured once. Collective; the same on every rank.

    It takes some ms where a message takes microseconds, up to 100 on 1 Gbit/s with 1 ms, 600 on 100 Mbit/s with 10 ms.
    Raises: `CommError` if a rank fails, or a single wait takes too long.
    """
    found = ranks.state.links
    if ranks.device_type not in found:
        links = found[ranks.device_type] = _measure(ranks)
        if ranks.rank == 0:
            say_once(f"network, measured: {links}")
    return found[ranks.device_type]


def _measure(ranks: Ranks) -> Links:
    by_host = ranks.by_host
    places = [tuple(r for r in place if r is not None) for place in itertools.zip_longest(*by_host)]
    across = [place for place in places if len(place) > 1]  # a ring for each place on a host
    inside = [tuple(x) for x in by_host if len(x) > 1]
    kinds = [inside, across[:1]]
    rings = _Rings(ranks)
    rings.slowest([])  # all are here, and NCCL has its communicator
    small = rings.slowest([rings.shift(x, SMALL, SEVERAL) for x in kinds])  # seconds inside a host, and between hosts
    probes = rings.slowest([rings.shift(x, PROBE, FEW) for x in kinds])
    sizes = [_long(_rate(PROBE, *seconds), seconds[1], rings.device) for seconds in zip(probes, small)]
    if across[1:]:  # all ranks of a host at once, for its port
        kinds.append(across)
        small.append(small[1])
        sizes.append(max(sizes[1] // len(across), PROBE))
    large = rings.slowest([rings.shift(x, size, FEW) for x, size in zip(kinds, sizes)])
    rates = [_rate(size, *seconds) for size, *seconds in zip(sizes, large, small)]
    port = max(rates[1], rates[2] * len(across)) if across[1:] else rates[1]
    return Links(
        inside=_link(small[0], rates[0], rates[0]) if inside else None,
        between=_link(small[1], rates[1], port) if across else None,
    )


def _link(*figures: float) -> Link:
    """Rounded to ten steps per decade, so that they are mostly the same in every run."""
    return Link(*(float(f"{10 ** (round(10 * math.log10(x)) / 10):.2g}") for x in figures))


def _rate(num_bytes: int, seconds: float, small: float) -> float:
    """Bytes/s of a message, without what a small one takes."""
    return num_bytes / without_latency(seconds, small) if seconds else math.inf


def without_latency(seconds: float, latency_s: float) -> float:
    """At least half: on a busy machine a small message may take longer than a large one."""
    return max(seconds - latency_s, seconds / 2)


def _long(rate: float, small: float, device: torch.device) -> int:
    """Bytes that take long enough to tell the bandwidth."""
    return int(min(max(rate * max(LONG_S, LONG * small), PROBE), MOST[device.type]))


class _Rings:
    """Messages around rings of ranks."""

    def __init__(self, ranks: Ranks):
        self._early = ranks.backend == "gloo"  # receives are posted before messages arrive
        self._ranks = ranks.on_host if self._early else ranks
        self.device = self._ranks.device

    def slowest(self, seconds: list[float]) -> list[float]:
        """The largest of all ranks' numbers, one by one. Collective."""
        mine = torch.tensor([[0.0, *seconds]], dtype=torch.float64, device=self.device)
        team = self._ranks.everyone
        return Pending(GATHERS[team.transport](mine, team), self.device, (mine,)).wait().amax(0)[1:].tolist()

    def shift(self, rings: list[Ring], num_bytes: int, count: int) -> float:
        """Median seconds of a message around this rank's ring, all rings at once; 0 if it is in none."""
        if not rings:
            return 0.0
        mail = Mail("measure_links", self._ranks)  # takes a tag on every rank
        ring = next((ring for ring in rings if self._ranks.rank in ring), None)
        if ring is None:
            return 0.0
        sent, arriving = (torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        shift = self._shift_early if self._early else self._shift_queued
        return statistics.median(shift(ring, sent, arriving, count, mail)[count // 2 :])

    def _shift_early(self, ring: Ring, sent, arriving, count: int, mail: Mail) -> list[float]:
        at, times = ring.index(self._ranks.rank), []
        for message in [mail.receive(arriving, ring[at - 1]) for _ in range(count)]:
            began = time.perf_counter()
            mail.send(sent, ring[(at + 1) % len(ring)])
            mail.wait(message)
            mail.sent()
            times.append(time.perf_counter() - began)
        return times

    def _shift_queued(self, ring: Ring, sent, arriving, count: int, mail: Mail) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            start_shift(sent, arriving, ring, self._ranks).wait()
            event.record()
        events[-1].synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in itertools.pairwise(events)]
