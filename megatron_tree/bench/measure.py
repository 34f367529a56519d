"""Timing one schedule on all ranks: they start together, the slowest one counts, and every result is checked."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..emulate import network_bytes
from .accelerator import Accelerator
from .ranks import Meeting, PeakMemory, sleep_until

MIN_STEPS = 3


class Measured(NamedTuple):
    """One rank's measurements of one contender. None: does not apply or is not known."""

    seconds: dict[str, list[float]]  # by pass, of each step: from the common start or the previous pass's end
    sent: dict[str, float]  # by pass: payload bytes that this rank sends in a step (`comm.record`)
    network: float | None = None  # mean bytes that this rank's node sent to others in a step
    memory: int | None = None  # peak bytes above what was resident before the step
    late_start: float | None = None  # median over steps of the last rank's delay at the start, seconds
    late_compute: float | None = None  # median overrun of this rank's emulated kernels, seconds
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


def first_step(step: Step, accelerator: Accelerator | None) -> tuple[Tensor, ...]:
    """One step with real kernels, to be checked; the kernels' results are recorded for timed steps."""
    with accelerator.recording() if accelerator else contextlib.nullcontext():
        return step(Laps([]))


def measure(
    step: Step,
    expected: tuple[Tensor, ...],
    *,
    rank: int,
    meeting: Meeting,
    accelerator: Accelerator | None,
    emulated: bool,
    steps: int,
    budget_s: float,
    latency_s: float,
) -> Measured:
    """Time up to `steps` steps: at least 3, and no more once budget_s is over. Collective.

    expected: results of the checked step, which every step must reproduce bit for bit. accelerator: replays its
    kernels; None: real kernels. emulated: the rank is in a node of a `Cluster`. latency_s: of the network, idle before
    each step.
    """
    gap = 0.02 + 2e-3 * meeting.ranks + 4 * latency_s
    begun = time.monotonic()
    seconds: dict[str, list[float]] = {}
    late_starts, memory, same, over = [], None, True, False
    if accelerator:
        accelerator.late.clear()
    before = network_bytes()["network"] if emulated else 0
    while len(late_starts) < steps and not (over and len(late_starts) >= MIN_STEPS):
        first = not late_starts
        with contextlib.ExitStack() as context:
            peak = context.enter_context(PeakMemory()) if first else None
            log = context.enter_context(comm.record())
            if accelerator:
                context.enter_context(accelerator.replaying())
            start = meeting.most(rank, time.monotonic())[0] + gap
            sleep_until(start)
            late = time.monotonic() - start
            laps = Laps(log)
            results = step(laps)
        if first:
            memory = peak.bytes
        *ends, late, spent = meeting.most(rank, *laps.ends.values(), late, time.monotonic() - begun)
        for name, end, previous in zip(laps.ends, ends, [start, *ends]):
            seconds.setdefault(name, []).append(end - previous)
        late_starts.append(late)
        over = spent > budget_s
        same &= all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
        del results
    after = network_bytes()["network"] if emulated else 0
    return Measured(
        seconds=seconds,
        sent=laps.sent,
        network=(after - before) / len(late_starts) if emulated else None,
        memory=memory,
        late_start=statistics.median(late_starts),
        late_compute=statistics.median(accelerator.late) if accelerator and accelerator.late else 0.0,
        same=same,
    )


def time_together(call: Callable[[], object], meeting: Meeting, rank: int, *, steps: int) -> float:
    """Seconds of a local computation that all ranks do at once, after one to warm up: the slowest rank's median."""
    times = []
    for _ in range(1 + steps):
        meeting.meet(rank)
        start = time.monotonic()
        call()
        times.append(time.monotonic() - start)
    return meeting.most(rank, statistics.median(times[1:]))[0]


def relative_error(found: Tensor, truth: Tensor) -> float:
    """The worst row's error: |found - truth| over |truth| + the rows' root mean square, norms over the last axis."""
    found, truth = found.double(), truth.double()
    norms = truth.norm(dim=-1)
    floor = norms.square().mean().sqrt()
    return ((found - truth).norm(dim=-1) / (norms + floor).clamp_min(1e-300)).max().item()
