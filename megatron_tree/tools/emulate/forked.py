"""Functions run on forked ranks: the common part of an emulated cluster and of local ranks.

The ranks of one run are forked from this process, watched, and always ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .network import die_with

_NUMBER = struct.Struct("=I")
_SHOWN_RANKS = 4  # ranks whose stacks an error message shows
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
        how = "has not ended" if self.status is None else f"ended with {self.status}"
        if self.status is not None and self.status < 0:
            how = f"was killed by {signal.Signals(-self.status).name}"
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


class ForkedProcess:
    """Ranks that `run` forks from this process (Linux). Subclasses define their number and their environment."""

    world_size: int

    def run(self, fn: Callable, *args, timeout_s: float = 120.0) -> list:
        """Run fn(*args) on every rank at once; returns the results by rank.

        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are set; fn
        calls `torch.distributed.init_process_group("gloo")` itself. A rank's process stays until all ranks have
        returned, so fn needs no barrier at its end. fn and args need not be picklable; results must be.

        Raises: RuntimeError with the last output of the ranks that failed, or with the stacks of those that have not
        returned after timeout_s seconds. All ranks are ended first.
        """
        results = [os.memfd_create(f"result of rank {number}") for number in range(self.world_size)]
        returned, leave = os.pipe(), os.pipe()

        def body(number: int) -> int:
            with open(results[number], "wb", closefd=False) as file:
                pickle.dump(fn(*args), file)
            os.write(returned[1], _NUMBER.pack(number))
            os.read(leave[0], 1)
            return 0

        def one_returned() -> None:
            ranks.idle.update(_NUMBER.unpack(os.read(returned[0], _NUMBER.size)))
            if len(ranks.idle) == self.world_size:
                os.write(leave[1], b"." * self.world_size)

        try:
            with Ranks() as ranks:
                ranks.call_when_readable(returned[0], one_returned)
                self._start(ranks, body)
                self._wait(ranks, timeout_s)
                if failed := ranks.failed():
                    raise RuntimeError("\n\n".join(map(self._describe, failed)))
            return [_load(result) for result in results]
        finally:
            for fd in (*results, *returned, *leave):
                os.close(fd)

    def _start(self, ranks: Ranks, body: Callable[[int], int]) -> None:
        """Start body(number) on every rank."""
        self._check()
        _require_forkable()
        port = self._port()
        for number in range(self.world_size):
            ranks.start(number, lambda number=number: self._place_and_run(number, port, body))

    def _wait(self, ranks: Ranks, timeout_s: float) -> None:
        """Wait until all ranks have ended or one has failed. Raises RuntimeError at the time limit."""
        seconds, limit = self._time_limit(timeout_s)
        ranks.wait(seconds, self._check)
        if late := ranks.late:
            stacks = "\n\n".join(map(self._describe, late[:_SHOWN_RANKS]))
            raise RuntimeError(f"ranks {[rank.number for rank in late]} had not finished after {limit}\n\n{stacks}")

    def _place_and_run(self, number: int, port: int, body: Callable[[int], int]) -> int:
        gc.freeze()  # what the parent made is not collected here: looking at it would copy its pages
        common = dict(RANK=number, WORLD_SIZE=self.world_size, MASTER_PORT=port, OMP_NUM_THREADS=1)
        os.environ.update({name: str(value) for name, value in {**common, **self._take_place(number)}.items()})
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the parent's thread pool does not survive the fork
        return body(number)

    def _take_place(self, number: int) -> dict:
        """In a forked rank: enter its node; returns LOCAL_RANK and its other environment variables."""
        raise NotImplementedError

    def _port(self) -> int:
        """A free port on the first rank's node for the rendezvous."""
        raise NotImplementedError

    def _time_limit(self, timeout_s: float) -> tuple[float, str]:
        """Seconds that a run may take, and the name of the limit."""
        return timeout_s, f"timeout_s={timeout_s:g}"

    def _check(self) -> None:
        """Raise RuntimeError if ranks can't start or continue."""

    def _describe(self, rank: Rank) -> str:
        return rank.describe()


class LocalRanks(ForkedProcess):
    """Processes of this machine that communicate over loopback; the counterpart of `emulate.Cluster`."""

    def __init__(self, ranks: int):
        if sys.platform != "linux":
            raise ValueError(f"--ranks needs Linux; this is {sys.platform}")
        self.world_size = ranks

    def _take_place(self, number: int) -> dict:
        here = dict(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
        return dict(LOCAL_RANK=number, LOCAL_WORLD_SIZE=self.world_size, **here)

    def _port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]


def _require_forkable() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        raise RuntimeError("torch.distributed is initialized in this process, and its threads don't survive a fork")


def _load(result: int):
    with open(result, "rb", closefd=False) as file:
        file.seek(0)
        return pickle.load(file)
