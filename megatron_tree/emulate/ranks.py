"""The ranks of one run: forked from this process, watched, and always ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .network import die_with

_KEPT_OUTPUT = 8000  # bytes of a rank's last output that an error message shows
_TICK_S = 0.5
_LAST_WORDS_S = 2.0  # for a rank past the time limit to print its stack
_SPINNING_THREAD = "gloo_tcp_loop"
_LOWEST_PRIORITY = 19


@dataclass
class Rank:
    """A forked process and its state."""

    number: int
    pid: int
    pidfd: int
    output: int
    status: int | None = None  # exit status, or minus the signal that ended it
    ended: float | None = None  # time.monotonic() when this was noticed
    last_output: bytearray = field(default_factory=bytearray)
    unfinished_line: bytes = b""
    reniced: set[str] = field(default_factory=set)

    def describe(self) -> str:
        """How it ended, and its last output."""
        text = self.last_output.decode(errors="replace").strip()
        how = "was killed by " + signal.Signals(-self.status).name if self.status < 0 else f"ended with {self.status}"
        return f"rank {self.number} {how}; its last output:\n{text or '(none)'}"


class Ranks:
    """Forks ranks and waits for them. A context manager: on exit all of them are ended.

    on_line(rank, line) receives every line of output as it arrives. The last output is also kept for error messages.
    """

    def __init__(self, on_line: Callable[[int, str], None] | None = None):
        self.ranks: list[Rank] = []
        self.late: list[Rank] = []  # those that exceeded the time limit of `wait`
        self.idle: set[int] = set()  # numbers of those that only wait for the others
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            self._reap(rank)
            self._read(rank)
            os.close(rank.pidfd)
            os.close(rank.output)
        self._selector.close()

    def start(self, number: int, body: Callable[[], int]) -> None:
        """Fork a rank that runs body() and exits with its return value; an exception is printed and gives status 1."""
        read, write = os.pipe2(os.O_CLOEXEC)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_rank(parent, write, body)
        os.close(write)
        os.set_blocking(read, False)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # the child does the same: the first one succeeds
        rank = Rank(number, pid, os.pidfd_open(pid), read)
        self.ranks.append(rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._reap(rank))
        self._selector.register(read, selectors.EVENT_READ, lambda: self._read(rank))

    def call_when_readable(self, fd: int, callback: Callable[[], None]) -> None:
        """Have `wait` call `callback` whenever fd is readable."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Return when all ranks have ended, one has failed, or the time is up. Calls check() periodically."""
        deadline = time.monotonic() + timeout_s
        while self.unfinished() and not self.failed():
            left = deadline - time.monotonic()
            if left <= 0:
                self._abort_late()
                return
            self.watch(min(left, _TICK_S))
            check()
        self._handle(0)  # failures at the same time, and the last output

    def watch(self, timeout_s: float) -> None:
        """Read the ranks' output and exit statuses; returns after the first event, or after timeout_s seconds."""
        self._handle(timeout_s)
        for rank in self.unfinished():
            _calm_gloo(rank)

    def unfinished(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.status is None]

    def failed(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.status]

    def _handle(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _abort_late(self) -> None:
        """Have late ranks print their stacks (faulthandler) and end."""
        self.late = [rank for rank in self.unfinished() if rank.number not in self.idle]
        for rank in self.late:
            os.kill(rank.pid, signal.SIGABRT)
        end = time.monotonic() + _LAST_WORDS_S
        while any(rank.status is None for rank in self.late) and time.monotonic() < end:
            self._handle(0.1)

    def _reap(self, rank: Rank) -> None:
        if rank.status is None:
            rank.status = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
            rank.ended = time.monotonic()
            self._selector.unregister(rank.pidfd)
        self._read(rank)

    def _read(self, rank: Rank) -> None:
        """Read what the rank has printed so far."""
        while True:
            try:
                chunk = os.read(rank.output, 65536)
            except BlockingIOError:
                return
            rank.last_output = (rank.last_output + chunk)[-_KEPT_OUTPUT:]
            *lines, rank.unfinished_line = (rank.unfinished_line + chunk).split(b"\n")
            if not chunk and rank.unfinished_line:
                lines, rank.unfinished_line = [rank.unfinished_line], b""
            for line in lines if self._on_line else ():
                self._on_line(rank.number, line.decode(errors="replace"))
            if not chunk:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(rank.output)
                return


def _calm_gloo(rank: Rank) -> None:
    """Give gloo's network threads, which spin while they wait, the lowest priority, as several ranks share a core."""
    with contextlib.suppress(OSError):  # it may end at any moment
        for task in os.listdir(f"/proc/{rank.pid}/task"):
            if task not in rank.reniced and _SPINNING_THREAD in Path(f"/proc/{rank.pid}/task/{task}/comm").read_text():
                os.setpriority(os.PRIO_PROCESS, int(task), _LOWEST_PRIORITY)
                rank.reniced.add(task)


def _be_rank(parent: int, output: int, body: Callable[[], int]) -> None:
    """The forked process: never returns."""
    status = 1
    try:
        die_with(parent)
        os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which ends the ranks
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable(sys.stderr)
        status = body()
    except SystemExit as error:
        status = _exit_status(error.code)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _exit_status(code) -> int:
    """As in Python: None gives 0, a message is printed and gives 1."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1
