"""Ranks of a benchmark: where they run, how they start a step at one instant, and what a step did to the machine.

All ranks of a run are forks of one process on one machine. So they share a clock, and they meet in shared memory: what
is measured stays alone on the network.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import multiprocessing
import os
import socket
import sys
import time

import torch
import torch.distributed as dist

from ..comm.rendezvous import start_default_group
from ..emulate.forked import Forked

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_fork = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


def sleep_until(instant: float) -> None:
    """Sleep until an instant of time.monotonic(). No spinning: with more ranks than cores it would delay the others."""
    while (left := instant - time.monotonic()) > 0:
        time.sleep(left)


class Meeting:
    """Where forked ranks exchange a few numbers without the network; made before they are forked."""

    def __init__(self, ranks: int, *, width: int = 4, timeout_s: float = 300.0):
        self.ranks, self._width, self._timeout_s, self._bank = ranks, width, timeout_s, 0
        self._barrier = _fork.Barrier(ranks)
        self._values = _fork.RawArray("d", 2 * ranks * width)

    def meet(self, rank: int, *values: float) -> list[tuple[float, ...]]:
        """Wait for all ranks; returns what each of them brought, by rank."""
        self._bank = 1 - self._bank  # a fast rank may come again before a slow one has read
        w, start = self._width, self._bank * self.ranks * self._width
        at = start + rank * w
        self._values[at : at + len(values)] = values
        self._barrier.wait(self._timeout_s)
        return [tuple(self._values[start + r * w : start + r * w + len(values)]) for r in range(self.ranks)]

    def most(self, rank: int, *values: float) -> list[float]:
        """The largest of each value over the ranks; nan if one is nan."""
        columns = zip(*self.meet(rank, *values))
        return [float("nan") if any(v != v for v in column) else max(column) for column in columns]


def shared_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that processes forked from this one share."""
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def join(timeout_s: float):
    """Make this process a gloo rank, as RANK and the other variables of its environment say; returns the group."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # sleeps end within 1 ns of their time, not 50 us
    start_default_group("gloo", timeout_s=timeout_s)
    return dist.group.WORLD


PR_SET_TIMERSLACK = 29


class PeakMemory:
    """The most memory this process held above what it had at the start, while the context is open (Linux).

    `bytes` is None where the kernel does not tell. Large buffers are mapped one by one meanwhile, so that what is freed
    leaves the count.
    """

    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

    def __enter__(self):
        self.bytes, self._libc = None, ctypes.CDLL(None)
        gc.collect()
        with contextlib.suppress(AttributeError):  # another C library
            self._libc.mallopt(self.M_MMAP_THRESHOLD, 1 << 16)
            self._libc.malloc_trim(0)
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the high-water mark falls to what is resident now
            self._start = _status("VmRSS")
        except OSError:
            self._start = None
        return self

    def __exit__(self, *failure):
        if self._start is not None:
            self.bytes = max(0, _status("VmHWM") - self._start)
        with contextlib.suppress(AttributeError):
            self._libc.mallopt(self.M_MMAP_THRESHOLD, 32 << 20)
            self._libc.mallopt(self.M_TRIM_THRESHOLD, 256 << 20)


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


class LocalRanks(Forked):
    """Plain ranks of this machine over its loopback interface; the counterpart of `emulate.Cluster`."""

    def __init__(self, ranks: int):
        if sys.platform != "linux":
            raise ValueError(f"--ranks needs Linux; this is {sys.platform}")
        self.world_size = ranks

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *failure) -> None:
        pass

    def _take_place(self, number: int) -> dict:
        here = dict(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
        return dict(LOCAL_RANK=number, LOCAL_WORLD_SIZE=self.world_size, **here)

    def _port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]
