"""Ranks of a benchmark: where they run, how they start a step at the same instant, and their peak memory.

All ranks of a run are forked from one process on one machine. So they share a clock, and they synchronize through
shared memory, which leaves the network to what is measured.
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
PR_SET_TIMERSLACK = 29  # prctl
_fork = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


def sleep_until(instant: float) -> None:
    """Sleep until an instant of time.monotonic(); spinning would delay other ranks on the same core."""
    while (left := instant - time.monotonic()) > 0:
        time.sleep(left)


def shared_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory shared with processes forked from this one."""
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


class Meeting:
    """A barrier in shared memory where ranks exchange a few numbers; made before they are forked."""

    def __init__(self, ranks: int, *, timeout_s: float = 300.0):
        self.ranks, self._timeout_s, self._barrier = ranks, timeout_s, _fork.Barrier(ranks)
        self._banks = [shared_tensor((ranks, 4), torch.float64) for _ in range(2)]

    def meet(self, rank: int, *values: float) -> list[list[float]]:
        """Wait for all ranks; returns the values of each, at most four, by rank."""
        self._banks.reverse()  # a fast rank may write again before a slow one has read
        self._banks[0][rank, : len(values)] = torch.tensor(values, dtype=torch.float64)
        self._barrier.wait(self._timeout_s)
        return self._banks[0][:, : len(values)].tolist()

    def most(self, rank: int, *values: float) -> list[float]:
        """The maximum of each value over the ranks; nan if one is nan."""
        return torch.tensor(self.meet(rank, *values), dtype=torch.float64).amax(0).tolist()


def join(timeout_s: float):
    """Initialize torch.distributed with gloo from RANK and the other environment variables; returns the group."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # sleeps overrun by 1 ns, not by 50 us
    start_default_group("gloo", timeout_s=timeout_s)
    return dist.group.WORLD


class PeakMemory:
    """Context that measures the process's peak memory above its memory at the start, in `bytes` (Linux).

    `bytes` is None where the kernel does not report it. Meanwhile large buffers are mapped one by one, so that freed
    memory is not counted.
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
                file.write("5")  # resets the high-water mark to the resident size
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
    """Processes of this machine that communicate over loopback; the counterpart of `emulate.Cluster`."""

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
