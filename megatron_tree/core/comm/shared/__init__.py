"""Collectives of the CPU ranks of one host through memory that they share: microseconds instead of messages.

All ranks of a group must be on one host and have a C compiler once; otherwise none of them uses it. The memory belongs
to an anonymous file of the first rank, which the others open through /proc: it needs no room in /dev/shm, and nothing
is left of it when the ranks end, however they end. memory.c says how ranks meet in it.

Every rank holds a lock on its own byte of the file, which the kernel releases when its process ends: so ranks that wait
notice a dead one. What else can go wrong is the watchdog's, as in any other collective.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ...compiled import NotCompiled, compiled
from ...errors import CommError
from ...kernels import merge_packed
from ...log import say_once
from ...tape import launch
from ..agreement import Refused, unanimous
from ..watchdog import Watchdog
from ..work import note, recorders

if TYPE_CHECKING:
    from ..ranks import Ranks

CAPACITY = 1 << 18  # bytes of a slot: what is larger goes in pieces
_OPTIONS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
_DONE, _WAITING, _DIFFERENT = range(3)  # these three as in memory.c
_GATHER, _EXCHANGE, _BROADCAST, _MERGE, *_SUMS = range(7)
_EVERYONE = -1
SUMS = dict(zip((torch.float32, torch.float64, torch.bfloat16), _SUMS))


_process = 0
"""How many forks lie between this process and the first one: `os.getpid` asks the kernel every time."""


def _note_fork() -> None:
    global _process
    _process += 1


os.register_at_fork(after_in_child=_note_fork)


class _Team(ctypes.Structure):
    """`Team` of memory.c."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("world", "rank", "capacity", "cores")),
        *((name, ctypes.c_uint64) for name in ("step", "stamp")),
        ("at", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("round", "published", "fd")),
    ]


def unavailable() -> str | None:
    """Why this process can't take part in shared memory, or None if it can."""
    if not hasattr(os, "memfd_create"):
        return "anonymous files are Linux's"
    loaded = _library()
    return loaded if isinstance(loaded, str) else None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """memory.c, or why it can't be had."""
    try:
        library = ctypes.CDLL(str(compiled(Path(__file__).with_name("memory.c"), *_OPTIONS, libraries=("-lm",))))
    except (NotCompiled, OSError) as error:
        return str(error)
    team, pointer, size = ctypes.POINTER(_Team), ctypes.c_void_p, ctypes.c_int64
    library.bytes_needed.argtypes, library.bytes_needed.restype = [size, size], size
    library.collective.argtypes = [team, size, size, pointer, pointer, size, pointer, ctypes.c_int32]
    library.merge_states.argtypes, library.merge_states.restype = [pointer, pointer, *[size] * 4], None
    library.be_alive.argtypes = library.sees_all.argtypes = [team]
    library.see_who_is_late.argtypes, library.see_who_is_late.restype = [team, pointer], None
    return library


def join(ranks: Ranks) -> SharedMemory | str:
    """The memory of a group, or why there is none: the same on all ranks. Collective."""
    if len(set(ranks.hosts)) > 1:
        return "its ranks are on several hosts"
    memory = None

    def make() -> str | None:
        nonlocal memory
        if (why := unavailable()) is not None:
            raise Refused(why)
        if ranks.rank == 0:
            memory = SharedMemory.make(ranks.size)
            return memory.address
        return None

    def enter() -> None:
        nonlocal memory
        if ranks.rank:
            memory = SharedMemory.join(address, ranks.size, ranks.rank)
        memory.be_alive()

    try:
        address = unanimous(ranks, "shared memory: made", make)[0]
        unanimous(ranks, "shared memory: joined", enter)
        unanimous(ranks, "shared memory: checked", lambda: memory.check())
    except Refused as refused:
        say_once(f"small collectives of ranks {list(ranks.state.ranks)} are messages, not shared memory: {refused}")
        return str(refused)
    return memory


def _cores(world: int) -> int:
    """For `world` of this host's ranks, which share its cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else world))
    return len(os.sched_getaffinity(0)) * world // max(world, ranks)


@functools.lru_cache(maxsize=64)
def _numbers(*numbers: int) -> ctypes.Array:
    return (ctypes.c_int64 * len(numbers))(*numbers)


class SharedMemory:
    """The memory of one group on one of its ranks, and the collectives in it: of contiguous tensors on the CPU."""

    capacity = CAPACITY

    def __init__(self, fd: int, name: str, world: int, rank: int):
        """fd: of the file, which is closed with this object; name: the file's."""
        self.address, self._process, self._in_use = f"{os.getpid()} {fd} {name}", _process, threading.Lock()
        weakref.finalize(self, os.close, fd)
        self._memory = mmap.mmap(fd, _library().bytes_needed(world, CAPACITY))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        sizes = {"world": world, "rank": rank, "capacity": CAPACITY, "cores": _cores(world)}
        self._team = _Team(memory=start, fd=fd, **sizes)
        self._ref, self._collective = ctypes.byref(self._team), _library().collective
        self._watchdog: Watchdog | None = None

    @classmethod
    def make(cls, world: int) -> SharedMemory:
        """On the first rank. Raises ``OSError`` if there is not enough memory."""
        name = f"megatron_tree {secrets.token_hex(16)}"
        fd = os.memfd_create(name)
        try:
            os.posix_fallocate(fd, 0, _library().bytes_needed(world, CAPACITY))
        except OSError:
            os.close(fd)
            raise
        return cls(fd, name, world, 0)

    @classmethod
    def join(cls, address: str, world: int, rank: int) -> SharedMemory:
        """On the other ranks. Raises ``OSError`` where the first rank's file can't be reached."""
        pid, fd, name = address.split(" ", 2)
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith(f"/memfd:{name}"):  # of a container with processes of its own
            raise OSError(f"process {pid} is not the one that the first rank means")
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), name, world, rank)

    def be_alive(self) -> None:
        """Hold this rank's lock, from now on."""
        if (error := _library().be_alive(self._ref)) != 0:
            raise OSError(error, f"no lock: {os.strerror(error)}")

    def check(self) -> None:
        """Raise ``OSError`` unless this rank sees that the others are alive."""
        if not _library().sees_all(self._ref):
            raise OSError("it does not see the locks of the other ranks")

    def gather(self, x: Tensor, ranks: Ranks) -> Tensor:
        """x of every rank -> [n, ...], in rank order."""
        out = x.new_empty((self._team.world, *x.shape))
        launch(self._run, "gather", ranks, _GATHER, _EVERYONE, x.data_ptr(), out.data_ptr(), x.nbytes)
        return out

    def gather_rows(self, x: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
        """x [counts[rank], ...] of every rank -> [sum(counts), ...], in rank order."""
        out = x.new_empty((sum(counts), *x.shape[1:]))
        size = x.shape[1:].numel() * x.element_size()
        parts = _numbers(*[n * size for n in counts])
        launch(
            self._run, "gather", ranks, _GATHER, _EVERYONE, x.data_ptr(), out.data_ptr(), out.nbytes, parts, x.nbytes
        )
        return out

    def merge_rows(self, state: Tensor, first: int, count: int, ranks: Ranks) -> Tensor:
        """Rows first .. first + count - 1 of the ranks' states [rows, ..., d + 1], merged as by `merge`.

        state: fp32, at most CAPACITY bytes.
        """
        out, columns = state.new_empty((count, *state.shape[1:])), state.shape[-1]
        rows = state.shape[1:-1].numel()
        parts = _numbers(columns, first * rows, count * rows)
        call = _MERGE, _EVERYONE, state.data_ptr(), out.data_ptr(), state.nbytes, parts
        launch(self._run, "merge", ranks, *call)
        return out

    def exchange(self, x: Tensor, ranks: Ranks) -> Tensor:
        """x [n, ...] -> [n, ...]: entry i came from rank i, whose entry for this rank it was."""
        out = torch.empty_like(x)
        size = x.nbytes // self._team.world
        launch(self._run, "exchange", ranks, _EXCHANGE, _EVERYONE, x.data_ptr(), out.data_ptr(), size)
        return out

    def sum(self, x: Tensor, ranks: Ranks) -> Tensor:
        """The sum of x, of a dtype in `SUMS`, over all ranks: in rank order, in fp32 at least."""
        out = torch.empty_like(x)
        launch(self._run, "sum", ranks, SUMS[x.dtype], _EVERYONE, x.data_ptr(), out.data_ptr(), x.nbytes)
        return out

    def merge(self, states: Tensor) -> Tensor:
        """`merge_packed` of states [n, ..., d + 1] that the ranks have handed each other; in C, if they are fp32.

        It may round otherwise than torch's operations do, but alike on all ranks, which run the same code.
        """
        if states.dtype != torch.float32:
            return merge_packed(states)
        merged = states.new_empty(states.shape[1:])
        columns, sizes = merged.shape[-1], (states.shape[0], merged.numel())
        launch(_library().merge_states, states.data_ptr(), merged.data_ptr(), *sizes, sizes[1] // columns, columns)
        return merged

    def broadcast(self, x: Tensor, source: int, ranks: Ranks) -> None:
        """x of rank `source` on all ranks, in place."""
        launch(self._run, "broadcast", ranks, _BROADCAST, source, x.data_ptr(), x.data_ptr(), x.nbytes)

    def _run(
        self, name: str, ranks: Ranks, op: int, source: int, x: int, out: int, num_bytes: int, parts=None,
        sent: int | None = None,
    ) -> None:  # fmt: skip
        """One collective of memory.c; sent: bytes that this rank sends, if they are others than num_bytes."""
        if _process != self._process:
            raise CommError("a forked process must create a process group of its own")
        if self._watchdog is None:
            self._watchdog = ranks.watchdog
        watchdog, world = self._watchdog, self._team.world
        if watchdog.error is not None or watchdog.rejection is not None:
            raise watchdog.unusable()
        if recorders:
            if sent is None:
                sends = source in (_EVERYONE, self._team.rank)
                sent = sends * num_bytes * (world if op == _EXCHANGE else 1)
            note(f"shared {name}", world, sent)
        watchdog.calls.made += 1
        with self._in_use:
            self._team.stamp = watchdog.calls.stamp
            call = self._ref, op, source, x, out, num_bytes, parts
            code = self._collective(*call, 1)
            if code == _WAITING:
                began = time.monotonic()
                with watchdog.waits(ranks.group):
                    while code == _WAITING:
                        self._look(watchdog, name, began, ranks.timeout_s)
                        code = self._collective(*call, 0)
        if code == _DIFFERENT:
            raise watchdog.calls_differ(f"shared {name} of {num_bytes} bytes")

    def _look(self, watchdog: Watchdog, name: str, began: float, limit_s: float) -> None:
        """See what keeps the others; raises an error if there is no use in waiting."""
        late = (ctypes.c_int8 * self._team.world)()
        _library().see_who_is_late(self._ref, late)
        ranks, why = [r for r, x in enumerate(late) if x == 2], "its process has ended"
        if not ranks:
            ranks, why = [r for r, x in enumerate(late) if x], "interrupted"
            if not watchdog.is_interrupted:
                if time.monotonic() - began < limit_s:
                    return
                why = "timed out"
        error = RuntimeError(why)
        raise watchdog.operation_failed(f"shared {name}", limit_s, error, range(self._team.world), ranks) from error
