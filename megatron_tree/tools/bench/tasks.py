"""Tasks in a process of their own, within a budget of time: what one of them breaks costs no other's results.

A kernel that goes wrong can leave the GPU unusable for its process, or never end. So a worker process runs the tasks,
one after another; it is replaced when it dies or no longer reaches the GPU, and killed when a task takes too long.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from ..calibrate.kernel_cases import Emit, device_works
from ..emulate.network import die_with

START_S = 60.0  # a worker process has to import torch and to reach the GPU
DONE, FAILED, NOT_RUN = "done", "failed", "not run"


class NotHere(RuntimeError):
    """A task can't run on this machine, and that is no failure; the message says why."""


class Task(NamedTuple):
    """Something to run, which hands its results to the function it is given, one by one."""

    stage: str
    label: str
    call: Callable[[Emit], None]
    """Can be pickled: a module's function, or a functools.partial of one."""
    seconds: float
    """About how long it takes: it is not begun with less left, and stopped after `limit_s`."""

    @property
    def limit_s(self) -> float:
        """Several times as long, for what is compiled late; of a long task less, which would cost too many others."""
        return min(8 * self.seconds, 20.0 + 3 * self.seconds)


class Outcome(NamedTuple):
    """How a task ended."""

    stage: str
    label: str
    status: str
    """DONE, FAILED or NOT_RUN."""
    seconds: float
    said: str = ""
    """Why it failed or did not run."""


class Worker:
    """The process that runs tasks."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()))
        self._process.start()
        theirs.close()

    def run(self, task: Task, limit_s: float, emit: Emit) -> tuple[str, str]:
        """Run a task for at most limit_s seconds: its status, and why it failed or did not run."""
        end = time.monotonic() + limit_s
        try:
            self._ours.send(task)
            while self._ours.poll(max(0.0, end - time.monotonic())):
                kind, *what = self._ours.recv()
                if kind == "row":
                    emit(*what)
                else:
                    status, said, usable = what
                    if not usable:
                        self.close()
                    return status, said
        except (EOFError, OSError):
            self.close()
            return FAILED, f"its process ended with exit code {self._process.exitcode}"
        self.close()
        return FAILED, f"stopped after {limit_s:.0f} s"

    @property
    def gone(self) -> bool:
        return not self._process.is_alive()

    def close(self) -> None:
        """Kill the process and those it has started."""
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._ours.close()


def _serve(connection, parent: int) -> None:
    os.setsid()  # a group, so that what a task starts is killed with it
    die_with(parent)
    while True:
        task = connection.recv()
        status, said = run_task(task, lambda row: connection.send(("row", row)))
        connection.send(("end", status, said, device_works()))


def run_task(task: Task, emit: Emit) -> tuple[str, str]:
    """Run a task in this process: its status, and why it failed or did not run."""
    try:
        task.call(emit)
    except NotHere as reason:
        return NOT_RUN, str(reason)
    except Exception as error:
        if not isinstance(error, (ValueError, RuntimeError)):
            traceback.print_exc()
        return FAILED, f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
        if torch.cuda.is_initialized() and device_works():
            torch.cuda.empty_cache()
    return DONE, ""


def run_tasks(
    tasks: Iterable[Task],
    *,
    end: float,
    emit: Emit,
    ended: Callable[[Outcome], None],
    ends: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Run tasks in order until the instant `end` of time.monotonic(); those that don't fit any more are not run.

    ends: for stages that end earlier. emit gets the results as they come, ended each task's outcome.
    """
    worker = None
    try:
        for task in tasks:
            begun = time.monotonic()
            left = ends.get(task.stage, end) - begun
            if left < task.seconds:
                said = f"needs about {task.seconds:.0f} s, and {max(left, 0):.0f} s of the budget are left"
                ended(Outcome(task.stage, task.label, NOT_RUN, 0.0, said))
                continue
            limit_s = task.limit_s + (0.0 if worker else START_S)
            worker = worker or Worker()
            status, said = worker.run(task, min(left, limit_s), emit)
            if worker.gone:
                worker = None
            ended(Outcome(task.stage, task.label, status, time.monotonic() - begun, said))
    finally:
        if worker:
            worker.close()
