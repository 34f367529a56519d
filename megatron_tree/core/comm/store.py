"""A client of the job's key-value store, for what ranks tell each other when a collective can't be relied on.

One thread of each process talks to the store of the default group, over its own connection. A request is a function
of the store, or a generator, which never blocks: it yields wherever it has to look again later. So every request has a
time limit that holds even when the process that hosts the store is stopped, and watchdogs are polled meanwhile.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import json
import math
import multiprocessing.util
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import CommError
from .group import CallRecord, GroupState, states

POLL_S = 0.1  # between two polls of the watchdogs of ranks that wait, ...
POLLS_PER_S = 1000  # ... which all ranks of a large job together make less often: one process answers them
MIN_PAUSE_S, MAX_PAUSE_S = 1e-4, 0.05  # between two steps of a request: the first pause, and the longest
SILENCE_S = 1.5  # that the store may take for one operation, before it counts as lost

NO_THREAD = (
    "the thread that talks to the job's key-value store is not running: a forked process must create a process group "
    "of its own"
)

Request = Callable[[dist.Store], object]


class StoreClient:
    """The store of one default group as this process sees it; `StoreClient.here()` finds it."""

    def __init__(self, group):
        self._group, self._shared = weakref.ref(group), distributed_c10d._get_default_store()
        self._inbox: queue.Queue = queue.Queue()  # CPython's SimpleQueue may wait forever if a time-out is short
        self._open: list[tuple[Generator, Future]] = []
        self._asked_at = math.inf
        self._error = NO_THREAD
        self.poll_s = max(POLL_S, GroupState.of(group).size / POLLS_PER_S)
        self.waiting_since = math.inf
        """When the main thread began to wait for an answer, see `time.monotonic`; inf: it does not."""
        self.records: dict[str, CallRecord] = {}
        """Of this rank's groups, by the prefix of their keys: what it has called is told when it leaves."""
        self._rank = dist.get_rank()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="megatron_tree store client", daemon=True)
        self._thread.start()
        atexit.register(_end, self._ends, self._thread)
        multiprocessing.util.Finalize(None, _stop, (self._ends, self._thread), exitpriority=0)  # no atexit in its ranks

    @classmethod
    def here(cls) -> StoreClient:
        """The client of the current default group, made at its first use. Raises: `CommError` if there is none."""
        if dist.group.WORLD is None:
            raise CommError("there is no default process group any more: call before dist.destroy_process_group()")
        state = GroupState.of(dist.group.WORLD)
        if state.store is None:
            state.store = cls(dist.group.WORLD)
        return state.store

    @property
    def watchdogs(self) -> list:
        """Of all groups of this job that are in use."""
        return [x.watchdog for x in states() if x.watchdog is not None and x.watchdog.store is self]

    def run(self, request: Request, at_least_s: float = 0.0):
        """What `request(store)` returns, however long it takes; it keeps its own time limit.

        at_least_s: seconds that a store which does not answer is waited for. Raises `CommError` then.
        """
        return self.wait(self.submit(request), at_least_s)

    def submit(self, request: Request) -> Future:
        """Start a request; its answer may be waited for, but not by another request."""
        answer: Future = Future()
        self._inbox.put((request, answer))
        return answer

    def wait(self, answer: Future, at_least_s: float = 0.0):
        """The answer to a request that `submit` has started; as `run`."""
        began = self.waiting_since = time.monotonic()
        try:
            while not concurrent.futures.wait([answer], POLL_S).done:
                now = time.monotonic()
                if now > began + at_least_s and now - self._asked_at > SILENCE_S:
                    self._error = _unreachable("no answer")
                    self._ends.set()
                if (self._ends.is_set() or not self._thread.is_alive()) and not answer.done():
                    raise CommError(self._error)
            return answer.result()
        except dist.DistError as error:
            raise CommError(_unreachable(error)) from error
        finally:
            self.waiting_since = math.inf

    def _work(self) -> None:
        try:
            self._serve()
            self._error = "the process group is gone"
            calls = {prefix: x.latest.number for prefix, x in self.records.items()}
            how = _how_it_ends() if self._ends.is_set() else "destroy_process_group"
            Farewell(how, self._ends.is_set(), calls).leave(self._store, self._rank)
        except dist.DistError as error:
            self._error = _unreachable(error)

    def _serve(self) -> None:
        self._asked_at = time.monotonic()
        self._store = self._shared.clone()  # asks the store, without a time limit where its process is stopped
        self._asked_at = math.inf
        pause, polled = POLL_S / 2, time.monotonic()
        while self._is_in_use() and not self._ends.is_set():
            with contextlib.suppress(queue.Empty):
                request, answer = self._inbox.get(timeout=pause)
                self._open.append((self._steps(request), answer))
                del request, answer  # which may be an error, whose traceback holds the group
                pause = MIN_PAUSE_S
            if time.monotonic() - polled >= self.poll_s:
                polled = time.monotonic()
                self._open += [(self._steps(x.poll), Future()) for x in self.watchdogs if x.wait is not None]
            self._open = [entry for entry in self._open if self._goes_on(*entry)]
            pause = min(2 * pause, MAX_PAUSE_S) if self._open else POLL_S / 2

    def _is_in_use(self) -> bool:
        """Not after `destroy_process_group`, even where the program still has the group in a variable."""
        group = self._group()
        return group is not None and group is dist.group.WORLD

    def _steps(self, request: Request) -> Generator:
        result = request(self._store)
        return (yield from result) if isinstance(result, Generator) else result

    def _goes_on(self, steps: Generator, answer: Future) -> bool:
        """One step of a request. Returns whether there are more."""
        self._asked_at = time.monotonic()
        try:
            next(steps)
            return True
        except StopIteration as stop:
            answer.set_result(stop.value)
        except Exception as error:  # the caller's, if it waits
            answer.set_exception(error)
            if isinstance(error, dist.DistError):
                raise
        finally:
            self._asked_at = math.inf
        return False


def _stop(ends: threading.Event, thread: threading.Thread) -> None:
    ends.set()
    thread.join(SILENCE_S)


def _end(ends: threading.Event, thread: threading.Thread) -> None:
    """At the end of the interpreter: a thread that comes back from torch after it aborts the process. So does one of
    gloo's, which drop finished work late."""
    _stop(ends, thread)
    time.sleep(0.1)


class Farewell(NamedTuple):
    """What a rank leaves in the store when it takes part no more: others may wait for it in later calls."""

    how: str
    is_last: bool
    """Whether its process ends, and not its process group alone: it has made no calls but those of `calls`."""
    calls: dict[str, int]
    """By the prefix of a group's keys, the number of its latest call in the group."""

    @classmethod
    def of(cls, store, rank: int) -> Farewell | None:
        """What a rank of the job, by its global number, has left, if it has."""
        return cls(*json.loads(store.get(key))) if store.check([key := f"megatron_tree/farewell/{rank}"]) else None

    def leave(self, store, rank: int) -> None:
        store.set(f"megatron_tree/farewell/{rank}", json.dumps(self))  # does not wait for an answer


def _leave_without_calls() -> None:
    """At the end of a process that has made no call, for which no thread does it."""
    if dist.is_initialized() and dist.get_world_size() > 1 and GroupState.of(dist.group.WORLD).store is None:
        with contextlib.suppress(RuntimeError):
            Farewell(_how_it_ends(), True, {}).leave(distributed_c10d._get_default_store(), dist.get_rank())


def _how_it_ends() -> str:
    kind = getattr(sys, "last_type", None)  # of an exception that nobody caught
    return kind.__name__ if kind else "exit"


# At the end of this process, also of one that multiprocessing has started, but not of one that is forked from it.
multiprocessing.util.Finalize(None, _leave_without_calls, exitpriority=0)


def set_first(store, key: str, value: str) -> str:
    """Write a value unless the key has one already; returns the key's value."""
    return store.compare_set(key, "", value).decode()


def _unreachable(error: object) -> str:
    reason = str(error).splitlines()[0]
    host = "rank 0, whose process hosts it,"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host = f"the launcher's agent on {os.environ.get('MASTER_ADDR', 'the first node')}, which hosts it,"
    return f"the job's key-value store can't be reached ({reason}): {host} does not respond"
