"""Messages between ranks: their times, and a check of their contents."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...core import comm
from ...core.comm import Transfer
from ...core.comm.wire import share_all

Pair = tuple[int, int]  # sender, receiver


class Times(NamedTuple):
    """Seconds of a round trip: a message and its answer."""

    median: float
    all: float
    """Total of `REPEATS` round trips."""


REPEATS = 8
_MANY = 40
_SMALL = 8  # bytes
_PAUSE_S = 5e-3


class Links:
    """Collective measurements on the default group: all ranks call the same methods in the same order."""

    def __init__(self, device: torch.device, timeout_s: float):
        self.device, self.ranks = device, comm.Ranks.of(dist.group.WORLD, device, limit_s=timeout_s)
        self.rank, self.world = self.ranks.rank, self.ranks.size
        self._early = self.ranks.backend == "gloo"  # with NCCL it would block

    def share(self, value) -> list:
        """Every rank's value (JSON types), by rank. All ranks return at about the same time."""
        return share_all(value, self.ranks)

    def median(self, seconds: float | None) -> float:
        """The median over the ranks that have a value."""
        return statistics.median(s for s in self.share(seconds) if s is not None)

    def exchange(self, pairs: Iterable[Pair], num_bytes: int = _SMALL, *, count: int = 1) -> dict[Pair, Times]:
        """All pairs at once: `count` messages one way, then a small answer; repeated.

        If the backend allows it, receives are posted before the message arrives. Raises ValueError if a message arrives
        corrupted.
        """
        mine = next((pair for pair in pairs if self.rank in pair), None)
        self.share(None)
        times = None
        if mine:
            run = self._send if self.rank == mine[0] else self._receive
            times = run(mine[1] if self.rank == mine[0] else mine[0], num_bytes, count)
        return {tuple(pair): Times(*times) for pair, times in self.share((mine, times)) if times}

    def reduce(self, schedule: str, latency_s: float) -> float:
        """Median seconds of the reduction of a tiny state over all ranks, as in a decode step.

        As in decoding, receives are posted before the rank's own work, which is a pause here.
        """
        pause = max(_PAUSE_S, 4 * latency_s)  # meanwhile senders learn that receives are posted
        state, times = torch.zeros(1, 8, device=self.device), []
        ranks = self._by("direct")
        reduction = comm.Reduction(ranks=ranks, schedule=schedule, shape=tuple(state.shape), dtype=state.dtype)
        self.share(None)
        for _ in range(_MANY):
            start = time.perf_counter()
            merge = reduction.start()
            time.sleep(pause)
            merge(state)
            times.append(time.perf_counter() - start - pause)
        return self.median(statistics.median(times[REPEATS:]))

    def _by(self, transport: str) -> comm.Ranks:
        return comm.Ranks.of(self.ranks.group, self.device, replace(self.ranks.config, transport=transport))

    def gather(self, places: tuple[tuple[int, ...], ...], num_bytes: int, transport: str) -> float:
        """Seconds of an all-gather of num_bytes per rank over all ranks: the slowest rank's median."""
        team = comm.Team(self._by(transport), places, ("calibrate", places))
        mine = torch.full((1, num_bytes), self.rank % 251, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(REPEATS):
            self.share(None)
            start = now(self.device)
            whole = comm.start_gather(mine, team).wait()
            times.append(now(self.device) - start)
        expected = torch.tensor(team.order, device=self.device).remainder(251).to(torch.uint8)[:, None]
        if not torch.equal(whole, expected.expand_as(whole)):
            raise ValueError(f"an all-gather among all ranks ({transport}) brought wrong bytes to rank {self.rank}")
        return max(self.share(statistics.median(times[1:])))

    def _send(self, peer: int, num_bytes: int, count: int) -> Times:
        message, answer, times = _pattern(num_bytes, self.rank, self.device), self._empty(_SMALL), []
        for _ in range(_repeats(num_bytes)):
            answered = self._start_receive(answer, peer) if self._early else None
            start = now(self.device)
            sent = [Transfer(message, peer, None, peer, self.ranks) for _ in range(count)]
            for transfer in [*sent, answered or self._start_receive(answer, peer)]:
                transfer.wait()
            times.append(now(self.device) - start)
        return Times(statistics.median(times[1:]), sum(times))

    def _receive(self, peer: int, num_bytes: int, count: int) -> None:
        buffers, answer = [self._empty(num_bytes) for _ in range(count)], _pattern(_SMALL, self.rank, self.device)

        def post():
            return [self._start_receive(buffer, peer) for buffer in buffers]

        arriving = post()
        for left in reversed(range(_repeats(num_bytes))):
            for transfer in arriving:
                transfer.wait()
            now(self.device)
            arriving = post() if left and self._early else []
            Transfer(answer, peer, None, peer, self.ranks).wait()
            arriving = arriving or (post() if left else [])
        now(self.device)
        expected = _pattern(num_bytes, peer, self.device)
        if not all(torch.equal(buffer, expected) for buffer in buffers):
            raise ValueError(f"a message of {num_bytes} bytes from rank {peer} to rank {self.rank} brought wrong bytes")

    def _start_receive(self, buffer, peer: int) -> Transfer:
        return Transfer(None, peer, buffer, peer, self.ranks)

    def _empty(self, num_bytes: int):
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)


def now(device: torch.device) -> float:
    """Clock time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _repeats(num_bytes: int) -> int:
    return _MANY if num_bytes == _SMALL else REPEATS


def _pattern(num_bytes: int, rank: int, device: torch.device):
    """A pattern of bytes that differs from rank to rank, and between adjacent bytes."""
    period = (torch.arange(251, device=device) * 7 + rank).remainder(251).to(torch.uint8)
    return period.repeat(num_bytes // 251 + 1)[:num_bytes].contiguous()
