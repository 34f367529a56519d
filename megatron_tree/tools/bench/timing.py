"""The ranks of a benchmark, and the timing of a schedule on them: they start a step together, the slowest counts, and
every result is checked.

All ranks of a run are forked from one process on one machine. So they share a clock, and they synchronize through
shared memory, which leaves the network to what is measured.

`Accelerator` is an emulated one: kernels that take as long as on a real one, and return results computed before. With
sixteen ranks on two cores, timings of real kernels would show contention for the cores. So the first step of a schedule
computes with real kernels and is checked against the oracle; the kernels' results are recorded. Timed steps communicate
everything again, but instead of running a kernel they sleep as long as an accelerator of the given speed would compute,
and return the recorded result. Records are keyed by the shapes and by samples of the queries and keys that have
arrived: a timed step that receives anything else fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import mmap
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...core import comm
from ...core.comm.rendezvous import start_default_group
from ...core.kernels import Backend
from ...core.kernels.blocks import DIAGONAL, split
from ...core.plan.plans import DUAL_PRODUCTS
from ..emulate import network_bytes

MIN_STEPS = 3
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PR_SET_TIMERSLACK = 29  # prctl
_fork = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


def shared_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory shared with processes forked from this one."""
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


class Meeting:
    """A barrier in shared memory where ranks exchange a few numbers; made before they are forked."""

    def __init__(self, ranks: int, *, timeout_s: float = 300.0):
        self.ranks, self._timeout_s, self._barrier = ranks, timeout_s, _fork.Barrier(ranks)
        self._banks = [shared_tensor((ranks, 8), torch.float64) for _ in range(2)]

    def meet(self, rank: int, *values: float) -> list[list[float]]:
        """Wait for all ranks; returns the values of each, at most eight, by rank."""
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


class RankTimes(NamedTuple):
    """One rank's measurements of one contender. None: does not apply or is not known."""

    seconds: dict[str, list[float]]  # by pass, of each step: from the common start or the previous pass's end
    sent: dict[str, float]  # by pass: payload bytes that this rank sends in a step (`comm.record`)
    network: float | None = None  # mean bytes that this rank's node sent to others in a step
    memory: int | None = None  # peak bytes above what was resident before the step
    cpu: list[float] | None = None  # CPU seconds of all threads in each step; None with modelled compute
    same: bool = True  # every step gave the same bits as the checked one


class Laps:
    """Times at which the passes of one step end: call it with a pass's name at its end."""

    def __init__(self, log: list[comm.Sent]):
        self.ends: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        self._log = log

    def __call__(self, name: str) -> None:
        self.ends[name] = time.monotonic()
        self.sent[name] = sum(x.bytes for x in self._log) - sum(self.sent.values())


Step = Callable[[Laps], tuple[Tensor, ...]]


class Timing:
    """The steps of one schedule: a checked one, then timed ones, at least 3 and up to how.steps in how.budget_s.

    Collective. Every timed step must reproduce the checked one's `results` bit for bit. With modelled compute the
    accelerator replays the checked step's kernels.
    """

    def __init__(self, step: Step, rank: int, meeting: Meeting, how, emulated: bool):
        self._step, self._rank, self._meeting, self._how, self._emulated = step, rank, meeting, how, emulated
        self._accelerator = Accelerator(how.speed) if how.compute == "modelled" else None
        self._gap = 0.02 + 2e-3 * meeting.ranks + 4 * how.latency_s * how.dilate  # the network is idle before a step
        self._left_s = how.budget_s
        self._seconds: dict[str, list[float]] = {}
        self._cpu, self._network = [], []
        self._sent, self._memory, self._same = {}, None, True
        with self._accelerator.recording() if self._accelerator else contextlib.nullcontext():
            self.results = step(Laps([]))

    @property
    def done(self) -> bool:
        """Whether all ranks have taken enough steps."""
        return len(self._cpu) >= self._how.steps or (len(self._cpu) >= MIN_STEPS and self._left_s <= 0)

    def step(self) -> None:
        """Time one step."""
        begun = time.monotonic()
        with contextlib.ExitStack() as context:
            peak = None if self._cpu else context.enter_context(PeakMemory())
            log = context.enter_context(comm.record())
            if self._accelerator:
                context.enter_context(self._accelerator.replaying())
            start = self._meeting.most(self._rank, time.monotonic())[0] + self._gap
            before = network_bytes()["network"] if self._emulated else 0
            sleep_until(start)
            cpu = time.process_time()
            laps = Laps(log)
            results = self._step(laps)
            self._cpu.append(time.process_time() - cpu)
        if peak:
            self._memory, self._sent = peak.bytes, laps.sent
        *ends, spent = self._meeting.most(self._rank, *laps.ends.values(), time.monotonic() - begun)
        self._network.append(network_bytes()["network"] - before if self._emulated else 0)
        for name, end, previous in zip(laps.ends, ends, [start, *ends]):
            self._seconds.setdefault(name, []).append(end - previous)
        self._left_s -= spent
        self._same &= all(torch.equal(x, y) for x, y in zip(results, self.results, strict=True))

    def measured(self) -> RankTimes:
        """This rank's measurements."""
        return RankTimes(
            seconds=self._seconds,
            sent=self._sent,
            network=statistics.mean(self._network) if self._emulated else None,
            memory=self._memory,
            cpu=None if self._accelerator else self._cpu,
            same=self._same,
        )


def take_turns(timings: list[Timing]) -> None:
    """Time all schedules step by step in turn, so that what else the machine does meets all of them alike."""
    while waiting := [timing for timing in timings if not timing.done]:
        for timing in waiting:
            timing.step()
        timings = waiting[::-1]


def time_together(call: Callable[[], object], meeting: Meeting, rank: int) -> float:
    """Seconds of a local computation that all ranks do at once, after one to warm up: the slowest rank's median."""
    times = []
    for _ in range(4):
        meeting.meet(rank)
        start = time.monotonic()
        call()
        times.append(time.monotonic() - start)
    return meeting.most(rank, statistics.median(times[1:]))[0]


SAMPLES = 32  # rows of a tensor that identify it


class UnseenInput(RuntimeError):
    """A timed step received queries or keys that the checked step of this schedule did not have."""


class Speed(NamedTuple):
    """The emulated accelerator's bytes/s of KV cache in decoding, and flop/s in training."""

    memory_bandwidth: float | None
    flops: float | None


ACCELERATOR = Speed(memory_bandwidth=7e9, flops=1e12)  # a GPU, scaled down as far as the emulated network


def sleep_until(instant: float) -> None:
    """Sleep until an instant of time.monotonic(); spinning would delay other ranks on the same core."""
    while (left := instant - time.monotonic()) > 0:
        time.sleep(left)


class Accelerator:
    """Replaces the kernels while `recording` or `replaying` is open."""

    def __init__(self, speed: Speed):
        self.speed = speed
        self._results: dict[tuple, object] = {}

    def recording(self) -> contextlib.AbstractContextManager:
        """Run the real kernels and record their results; drops earlier records."""
        self._results.clear()
        return _replaced(self._record)

    def replaying(self) -> contextlib.AbstractContextManager:
        """Sleep instead of computing; return copies of the recorded results."""
        return _replaced(self._replay)

    def _record(self, name: str, run, args, options, dual: bool):
        result = run(*args, **options)
        self._results[_key(name, args, options)] = _copy(result)
        return result

    def _replay(self, name: str, run, args, options, dual: bool):
        end = time.monotonic() + self.seconds(name, args, options, dual)
        key = _key(name, args, options)
        if key not in self._results:
            raise UnseenInput(f"{name} got queries or keys that the checked step did not have: {key[1]}")
        result = _copy(self._results[key])
        sleep_until(end)
        return result

    def seconds(self, name: str, args, options, dual: bool) -> float:
        """Duration of one call: from the shard's bytes for decoding, from the visible pairs' flops for training. dual:
        of dual tensors, with twice the columns."""
        if name == "attn_decode":
            return (args[1].k.nbytes + args[1].values.nbytes) / self.speed.memory_bandwidth
        q, _, v = args[1:4] if name == "attn_bwd" else args[:3]
        pairs = visible_pairs(options["q_segments"], options["k_segments"], options["spec"])
        flops = attention_flops(pairs * q.shape[0] * q.shape[2], q.shape[3], v.shape[3], name)
        return flops * (DUAL_PRODUCTS / 2 if dual else 1) / self.speed.flops


def visible_pairs(q_segments, k_segments, spec) -> int:
    """Number of visible (query, key) pairs of the segments."""
    blocks = split(q_segments, k_segments, spec)
    return sum(b.q_len * (b.q_len + 1) // 2 if b.kind == DIAGONAL else b.q_len * b.k_len for b in blocks)


def attention_flops(pairs: int, head_dim: int, head_dim_v: int, name: str = "attn_fwd") -> float:
    """Flops of the matrix products over `pairs` (query, key, head) triples: two products forward, five backward."""
    return 2.0 * pairs * (3 * head_dim + 2 * head_dim_v if name == "attn_bwd" else head_dim + head_dim_v)


@contextlib.contextmanager
def _replaced(handler) -> Iterator[None]:
    """Replace the functions of every backend by handler(name, original, args, options, whether tensors are dual)."""
    originals = {name: getattr(Backend, name) for name in ("attn_decode", "attn_fwd", "attn_bwd")}

    def replaced(name: str, run):
        return lambda self, *args, **options: handler(name, functools.partial(run, self), args, options, self.dual)

    for name, run in originals.items():
        setattr(Backend, name, replaced(name, run))
    try:
        yield
    finally:
        for name, run in originals.items():
            setattr(Backend, name, run)


def _copy(result):
    return result.clone() if isinstance(result, Tensor) else tuple(x.clone() for x in result)


def _key(name: str, args, options) -> tuple:
    q, k = args[1:3] if name == "attn_bwd" else args[:2]
    k = k.k if name == "attn_decode" else k
    segments = options.get("q_segments"), options.get("k_segments")
    return name, (tuple(q.shape), tuple(k.shape)), segments, _sample(q), _sample(k)


def _sample(x: Tensor) -> tuple[float, ...]:
    """A few values of x [b, s, h, d], spread over its rows."""
    if x.numel() == 0:
        return ()
    return tuple(x[0, :: max(1, x.shape[1] // SAMPLES), 0, 0].tolist())
