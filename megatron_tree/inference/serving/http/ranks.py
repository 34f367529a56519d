"""The ranks as an HTTP front end in a process of its own sees them: it starts them, and starts them again."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from ....core.comm.rendezvous import host_store
from ....core.errors import TreeError
from ....core.log import logger
from ...generation.requests import Event, EventSink, Request
from ...generation.scheduler import Load
from ...generation.speculation import SpeculationCounts
from . import link
from .arguments import LINK

POLL_S = 0.1
LAST_WORDS_S = 5.0  # for other ranks to say what they saw, once one has ended with an error
WINDOW_S = 3600.0  # in which `restarts` are counted
MAX_RESUMED = 2  # times that one request goes on: perhaps it is what ends the ranks
STOPPED = "the server is stopping"


class RanksError(TreeError):
    """The ranks have ended, and are not started again; or they failed on a request."""


class RestartError(TreeError):
    """The ranks are being started again: try again later."""


@dataclass(kw_only=True, eq=False)
class OpenRequest:
    """A request, and what has been sent of its answers."""

    request: Request
    sink: EventSink
    taken: Future = field(default_factory=Future)
    """Whether the scheduler takes it."""
    begun: list[list[int] | None]
    """As `Request.begun`, with [] for answers without a token."""
    resumed: int = 0
    cancelled: bool = False

    @property
    def tokens(self) -> list[list[int] | None]:
        """For another scheduler: nothing until there are tokens, which all answers get in the same turn."""
        return self.begun if any(tokens != [] for tokens in self.begun) else []

    def take(self) -> None:
        """The scheduler has taken it; any number of times."""
        if not self.taken.done():
            self.taken.set_result(None)

    def note(self, event: Event) -> None:
        if event.token is not None:
            self.begun[event.answer].append(event.token)
        if event.finish_reason is not None:
            self.begun[event.answer] = None
        self.sink(event)

    def end(self, number: int, reason: str, error: str | None = None) -> None:
        """End all answers that have not ended."""
        going = [i for i, tokens in enumerate(self.begun) if tokens is not None]
        for i in going:
            self.note(Event(number, i, finish_reason=reason, error=error, last=i == going[-1]))


class Ranks:
    """Starts ranks on this machine and has the methods of a `Scheduler` that `Frontend` and `serve` use.

    When a rank ends, or rank 0 is silent, all are ended and started again. What clients wait for goes on:
    requests are sent to the new ranks with the tokens that were sent, and those continue as after a preemption.
    `submit`, `cancel` and `stop` are for any thread; `start`, `run_once` and `close` for one.

    Args:
        command: of every rank. size: number of ranks.
        restarts: at most so many in an hour; one failure more ends the server.
        wait_s: rank 0 counts as lost after this many seconds of silence.
        max_rows, max_waiting: of rank 0's scheduler.
    """

    def __init__(
        self, command: Sequence[str], *, size: int, restarts: int, wait_s: float, max_rows: int, max_waiting: int
    ):
        self._command, self._size, self._most, self._wait_s = list(command), size, restarts, wait_s
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.limits: dict[str, int] = {}
        """What rank 0 says of the model once it is ready for the first time."""
        self.restarts = 0
        """Since the start of this process."""
        self.failure = ""
        """Why the ranks are being started again; empty while they serve."""
        self.preemptions, self.speculated, self.waited_s = 0, SpeculationCounts(), 0.0
        self._waiting = self.rows_in_use = 0
        self._times: deque[float] = deque(maxlen=restarts or 1)
        self._lock, self._numbers = threading.RLock(), itertools.count()
        self._open: dict[int, OpenRequest] = {}
        self._ready = self._over = False
        self._grace: float | None = None
        self._processes: list[subprocess.Popen] = []
        self._outbox, self._connection = queue.SimpleQueue(), None
        self._took_s = 0.0  # the last start

    # --- what a scheduler has ---

    def submit(self, request: Request, sink: EventSink) -> int:
        """As `Scheduler.submit`, also in what it raises; `RestartError` too."""
        request = replace(request, sampling=request.sampling.with_seed())
        opened = OpenRequest(request=request, sink=sink, begun=[[] for _ in range(request.n)])
        told = link.request_to_json(request, [])  # images take a while
        with self._lock:
            if self._grace is not None:
                raise TreeError(STOPPED)
            if not self._ready:
                raise RestartError(self.failure)
            number = next(self._numbers)
            self._open[number] = opened
            self._post("submit", number, told)
        opened.taken.result()
        return number

    def cancel(self, number: int) -> bool:
        with self._lock:
            if number in self._open:
                self._open[number].cancelled = True
                self._post("cancel", number)
            return number in self._open

    def stop(self, *, grace_s: float = 0.0) -> None:
        """`run_once` does it."""
        self._grace = grace_s if self._grace is None else min(self._grace, grace_s)
        self._told_to_stop = False

    def run(self) -> None:
        while self.run_once():
            pass

    def run_once(self) -> bool:
        """Hear what rank 0 says, and start the ranks again where they have ended. False once they have stopped.

        Raises: `RanksError` when they are not started again.
        """
        if self._grace is not None and not self._told_to_stop and self._ready:
            self._told_to_stop = True
            self._post("stop", self._grace)
        lost = not self._hear(POLL_S)
        ended = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
        silent = self._ready and time.monotonic() - self._heard > self._wait_s
        if lost or ended or silent:
            self._after_end(f"rank 0 has said nothing for {self._wait_s:g} s" if silent else "")
        elif self._grace is not None and not self._ready:
            self._end_all("cancelled")
            raise RanksError(f"stopped while the ranks were being started again: {self.failure}")
        return not self._over

    def fail(self, error: BaseException) -> None:
        """End all requests with this error."""
        self._ready = False
        self._end_all("error", f"{type(error).__name__}: {error}")

    @property
    def load(self) -> Load:
        """What waits as rank 0 said last."""
        with self._lock:
            waiting = min(self._waiting, len(self._open))
            return Load(waiting, len(self._open) - waiting)

    # --- processes ---

    @property
    def ready_in_s(self) -> float:
        """Until requests are answered again, if the ranks start as fast as the last time."""
        return max(1.0, self._began + self._took_s - time.monotonic())

    def start(self) -> None:
        """Start the ranks; `run_once` notices when they are ready."""
        self._began = self._heard = time.monotonic()
        self._told_to_stop = False
        self._last_words = ""
        self._store = host_store()
        ours, theirs = socket.socketpair()
        with theirs:
            env = _environment(self._size) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
            for rank in range(self._size):
                fds = (theirs.fileno(),) if rank == 0 else ()
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), LINK: str(fds[0] if fds else -1)}
                self._processes.append(subprocess.Popen(self._command, env=env | own, pass_fds=fds))
        self._connection, self._outbox = Connection(ours.detach()), queue.SimpleQueue()
        threading.Thread(target=_write, args=(self._outbox, self._connection), daemon=True).start()

    def close(self) -> None:
        """End the ranks at once."""
        self._outbox.put(None)
        for process in self._processes:
            process.kill()
            process.wait()
        if self._connection is not None:
            self._connection.close()
        self._processes, self._store = [], None

    def _after_end(self, why: str) -> None:
        """A rank has ended: wait for what the others say and until they end, too; then start all again."""
        if self._grace is None:
            self._ready, self.failure = False, why or self._last_words or "a rank has ended"
        statuses = self._wait_for_end()
        self._ready = False
        why = why or self._last_words or _told(statuses)
        self.close()
        if self._grace is not None:
            self._end_all("cancelled")  # what came too late for rank 0
            if not any(statuses):
                self._over = True
                return
        self._times = deque((t for t in self._times if time.monotonic() - t < WINDOW_S), maxlen=self._times.maxlen)
        if not self.limits or self._grace is not None or len(self._times) >= self._most:
            tried = f" (after {self._most} restarts within an hour)" if self._most and self.limits else ""
            raise RanksError(f"the ranks have ended{tried}: {why}")
        self._times.append(time.monotonic())
        self.restarts += 1
        self.failure = why
        self.waited_s, self._waiting, self.rows_in_use = 0.0, len(self._open), 0
        logger.warning("the ranks are started again (restart %d): %s", self.restarts, why)
        self._give_up_some()
        self.start()

    def _wait_for_end(self) -> list[int]:
        """The exit statuses of all ranks; those that do not end by themselves are killed."""
        end = time.monotonic() + LAST_WORDS_S
        while self._hear(0.0) or any(process.poll() is None for process in self._processes):
            if time.monotonic() > end:
                break
            time.sleep(POLL_S / 10)
        return [process.poll() for process in self._processes]

    def _give_up_some(self) -> None:
        """Requests that don't go on: cancelled, not yet taken, or met by failures again and again."""
        with self._lock:
            for number, request in list(self._open.items()):
                if request.cancelled:
                    self._drop(number, request, "cancelled")
                elif not request.taken.done():
                    del self._open[number]
                    request.taken.set_exception(RestartError(self.failure))
                elif request.resumed >= MAX_RESUMED:
                    text = f"the ranks failed {MAX_RESUMED + 1} times while it was open: {self.failure}"
                    self._drop(number, request, "error", text)

    # --- messages ---

    def _post(self, *message: Any) -> None:
        self._outbox.put(message)

    def _hear(self, wait_s: float) -> bool:
        """Take what rank 0 says within some seconds. False if it has ended."""
        try:
            while self._connection.poll(wait_s):
                self._heard, wait_s = time.monotonic(), 0.0
                what, *about = link.receive(self._connection)
                getattr(self, f"_on_{what}")(*about)
        except (EOFError, OSError):
            return False
        return True

    def _on_ready(self, limits: dict[str, int]) -> None:
        with self._lock:
            self.limits, self._ready, self.failure = limits, True, ""
            self._took_s = time.monotonic() - self._began
            for number, request in sorted(self._open.items()):
                request.resumed += 1
                self._post("submit", number, link.request_to_json(request.request, request.tokens))
                if request.cancelled:
                    self._post("cancel", number)

    def _on_taken(self, number: int, error: list[str] | None) -> None:
        with self._lock:
            request = self._open.get(number)
            if request is None:
                return
            if error is None:
                request.take()
            elif request.taken.done():
                self._drop(number, request, "error", error[1])
            else:
                del self._open[number]
                request.taken.set_exception(link.REFUSALS.get(error[0], RanksError)(error[1]))

    def _on_events(self, events: list[list[Any]]) -> None:
        with self._lock:
            for event in map(link.event_from_json, events):
                if event.request in self._open:
                    self._open[event.request].take()  # its first turn may be faster than what says so
                    self._open[event.request].note(event)
                    if event.last:
                        del self._open[event.request]

    def _on_load(self, load: list[int], preemptions: int, speculated: list[int], waited_s: float) -> None:
        self.preemptions, self.speculated, self.waited_s = preemptions, SpeculationCounts(*speculated), waited_s
        self._waiting, _, self.rows_in_use = load

    def _on_failed(self, error: str) -> None:
        self._last_words = error

    def _end_all(self, reason: str, error: str | None = None) -> None:
        with self._lock:
            for number, request in list(self._open.items()):
                self._drop(number, request, reason, error)

    def _drop(self, number: int, request: OpenRequest, reason: str, error: str | None = None) -> None:
        del self._open[number]
        if request.taken.done():
            request.end(number, reason, error)
        else:
            request.taken.set_exception(RanksError(error) if error else TreeError(STOPPED))


def _write(outbox: queue.SimpleQueue, connection: Connection) -> None:
    """A rank that does not read keeps this thread waiting, and no other."""
    while (message := outbox.get()) is not None:
        try:
            link.send(connection, *message)
        except OSError:  # its ranks have ended
            return


def _environment(size: int) -> dict[str, str]:
    """Of a rank, as a launcher on one machine sets it."""
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    defaults = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return defaults | os.environ | {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # fmt: skip


def _told(statuses: list[int | None]) -> str:
    """Which ranks ended, and how."""
    ends = []
    for rank, status in enumerate(statuses):
        if status is None:
            ends.append(f"rank {rank} did not end")
        elif status:
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            ends.append(f"rank {rank} ended {how}")
    return "; ".join(ends) or "all ranks ended without being asked to"
