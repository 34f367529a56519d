"""The job's key-value store as a notice board: what ranks tell each other when a collective can't be relied on.

One thread of each process, the clerk, talks to the store of the default group, over a connection of its own. What it
does for a caller is a generator that never blocks: it yields wherever it has to look again later. So every request has
a time limit that holds even when the process that keeps the store is stopped, and other ranks' news are read meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import CommError

TICK = 0.1  # seconds between two looks at the news while this rank waits for others
SOONEST, LATEST = 1e-4, 0.05  # seconds between two steps of a request: the first pause, and the longest
SILENCE = 1.5  # seconds that one question to the store may take, before it counts as lost

CLERK_GONE = "the thread that talks to the job's store is not there: a forked process must make a group of its own"

Request = Callable[[object], Generator[None, None, object]]


class _Silent(Exception):
    """The store does not answer."""


class Board:
    """The store of one default group as this process sees it; `Board.here()` finds it."""

    def __init__(self, group):
        self._group = weakref.ref(group)
        self._shared_store = distributed_c10d._get_default_store()
        self._inbox: queue.Queue = queue.Queue()  # CPython's SimpleQueue may wait forever if a time-out is short
        self._open: list[tuple[Generator, Future]] = []
        self._watches: list[weakref.ref] = []
        self._lost: Exception | None = None
        self._asked_at = math.inf
        self._clerk = threading.Thread(target=self._work, name="megatron_tree board", daemon=True)
        self._clerk.start()

    @classmethod
    def here(cls) -> Board:
        """The board of the default group of now, made at its first use."""
        made, group = _boards.setdefault(os.getpid(), weakref.WeakKeyDictionary()), dist.group.WORLD
        if group not in made:  # a forked process makes its own: it has no threads of its parent's
            made[group] = cls(group)
        return made[group]

    def watch(self, watch) -> None:
        """Call `watch.tick(store)`, a generator function, every `TICK` seconds while `watch.waiting` is not None.

        It happens in the clerk's thread, until nobody else holds the watch.
        """
        self._watches = [known for known in self._watches if known() is not None] + [weakref.ref(watch)]

    def ask(self, request: Request, seconds: float = 0.0):
        """What the generator `request(store)` returns, however long it takes; it keeps its own time limit.

        seconds: how long a store that does not answer is waited for, at least. Raises `CommError` then.
        """
        answer, end = self.start(request), time.monotonic() + seconds
        try:
            while not answer.done():
                concurrent.futures.wait([answer], timeout=TICK)
                if answer.done():
                    break
                if self._lost is not None:
                    raise self._lost
                if not self._clerk.is_alive():
                    raise CommError(CLERK_GONE)
                now = time.monotonic()
                if now > end and now - self._asked_at > SILENCE:
                    raise _Silent("no answer")
            return answer.result()
        except (_Silent, dist.DistError) as error:
            self._lost = error
            raise CommError(_lost_keeper(error)) from error

    def start(self, request: Request) -> Future:
        """Let the clerk carry out a request; its answer may be waited for, but not by the clerk."""
        answer: Future = Future()
        self._inbox.put((request, answer))
        return answer

    def _work(self) -> None:
        try:
            self._serve()
            self._lost = self._lost or dist.DistStoreError("the process group is gone")
        except dist.DistError as error:
            self._lost = error

    def _serve(self) -> None:
        self._asked_at = time.monotonic()
        self._store = self._shared_store.clone()  # asks, and without a limit where the keeper is stopped
        self._asked_at = math.inf
        pause, looked = TICK / 2, time.monotonic()
        while self._group() is not None and self._lost is None:
            with contextlib.suppress(queue.Empty):
                request, answer = self._inbox.get(timeout=pause)
                self._open.append((request(self._store), answer))
                pause = SOONEST
            if time.monotonic() - looked >= TICK:
                looked = time.monotonic()
                watches = [watch for known in self._watches if (watch := known()) is not None and watch.waiting]
                self._open += [(watch.tick(self._store), Future()) for watch in watches]
                del watches
            self._advance()
            pause = min(2 * pause, LATEST) if self._open else TICK / 2

    def _advance(self) -> None:
        """One step of every open request."""
        for entry in list(self._open):
            steps, answer = entry
            self._asked_at = time.monotonic()
            try:
                next(steps)
                continue
            except StopIteration as stop:
                answer.set_result(stop.value)
            except Exception as error:  # the caller's, if it waits
                answer.set_exception(error)
                self._lost = error if isinstance(error, dist.DistError) else self._lost
            finally:
                self._asked_at = math.inf
            self._open.remove(entry)


_boards: dict[int, weakref.WeakKeyDictionary] = {}  # process id -> default group -> board


def set_first(store, key: str, value: str) -> str:
    """Write a value where there is none yet; returns what is there then."""
    return store.compare_set(key, "", value).decode()


def _lost_keeper(error: Exception) -> str:
    reason = str(error).splitlines()[0]
    keeper = "rank 0, whose process keeps it,"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        keeper = f"the launcher's agent on {os.environ.get('MASTER_ADDR', 'the first node')}, which keeps it,"
    return f"the job's key-value store can't be reached ({reason}): {keeper} is dead or stuck"
