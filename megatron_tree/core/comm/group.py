"""A process group, and what this process keeps about it, the record of its calls among it."""

from __future__ import annotations

import contextvars
import itertools
import math
import os
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import CommError

REMEMBERED = 8  # latest calls that this rank can be asked about, and may wait in


@dataclass(eq=False)
class Call:
    """One call of a group."""

    name: str
    number: int
    after: int = 0
    """`CallRecord.made` when it began."""
    compare: Callable | None = None
    """compare(this call, store) is the request that compares it if another rank asks; None where it is or was."""
    runs: bool = False
    """Whether this rank runs the call, or did: it may wait in it, and can be asked about it. Not if it rejects it."""

    def __str__(self) -> str:
        return f"{self.name}, call {self.number} of its group"


class CallRecord:
    """The calls of one group on this rank. Its main thread makes them; other threads only read."""

    def __init__(self):
        self.stamp = 0
        """Carried by the messages of the current call, or else of the latest: its number, and 32 bits of what was
        agreed and of the step; 0 before the first call."""
        self.digest = 0
        """The stamp in 32 bits."""
        self.current: Call | None = None
        """The call that this rank is in."""
        self.latest = Call("", 0)
        """Number 0: there was none."""
        self.doubts = False
        """Whether the latest call ended in an error that left the group usable: the ranks compare the next one."""
        self.meets = True
        """Whether collectives that carry no stamp are preceded by a meeting (work.py)."""
        self.met = 0
        """Stamp of the latest call in which the ranks have met."""
        self.log: list[str] = []
        """The latest calls, where they are compared afterwards (agreement.py)."""
        self.step: tuple[dict, int] = {}, 0
        """What this rank's calls are part of: the values that identify it, and 32 bits of them. Calls of different
        steps don't belong together, however alike they are."""
        self.of_parent = False
        """Whether this process is forked from a rank of the group: it would wait for messages that nobody sends."""
        self.made = 0
        """Collectives since the latest call began: as many on every rank."""
        self._agreed = 0
        """Of the stamp, what was agreed."""
        self._latest: deque[Call] = deque(maxlen=REMEMBERED)

    def begin(self, name: str, digest: int = 0, *, meets: bool = True) -> Call:
        """The group's next call. digest: 32 bits of what its ranks agree on. Raises: CommError in a forked process."""
        if self.of_parent:
            raise CommError(
                f"{name} in a process that is forked from a rank, such as a DataLoader's worker: make the call in the "
                "rank itself; a forked process must create a process group of its own"
            )
        call = Call(name, self.latest.number + 1, self.made)
        self.meets, self.made = meets, 0
        self.current = self.latest = call
        self._latest.append(call)
        self._set_stamp(digest)
        return call

    def running(self) -> list[Call]:
        """The latest calls that run, or did, oldest first; from any thread."""
        return [call for call in list(self._latest) if call.runs]

    def begin_step(self, values: dict) -> None:
        """What comes now is part of a step that these values, equal on all ranks, and the number of the call before it
        identify."""
        values = {**values, "after_call": self.latest.number}
        self.set_step(values, zlib.crc32(repr(values).encode()))

    def set_step(self, values: dict, digest: int) -> None:
        self.step = values, digest
        self._set_stamp(self._agreed)

    def doubt(self) -> None:
        """The latest call ended in an error that left the group usable."""
        self.doubts = True
        self._set_stamp(0)

    def _set_stamp(self, agreed: int) -> None:
        self.stamp, self._agreed = self.latest.number << 32 | agreed ^ self.step[1], agreed
        self.digest = zlib.crc32(self.stamp.to_bytes(8, "little"))

    def place(self) -> str:
        """Where this rank is, for messages: " in tree_attn_func, call 3 of its group"."""
        return f" in {self.current}" if self.current else f" after {self.latest}" if self.latest.number else ""


class Recent(dict):
    """The `most` entries that were set last: packed documents make new kinds of calls in every batch."""

    def __init__(self, most: int):
        self.most = most

    def __setitem__(self, key, value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]


@dataclass(eq=False)
class GroupState:
    """What this process keeps about one process group, until the group is freed; `GroupState.of(group)` looks it up.

    No field refers to the group itself. Each is written by the module named beside it, and by no other; what is `Any`
    has a type of that module, and is None until that module makes it.
    """

    size: int
    rank: int
    backends: dict[str, str]
    """By the type of a device, the backend that carries its tensors: gloo or nccl."""
    ranks: tuple[int, ...]
    """The global rank of every rank of the group."""
    subgroups: dict[tuple, dist.ProcessGroup] = field(default_factory=dict)
    """team.py: (team's name, ranks) -> their process group."""
    tags: Iterator[int] = field(default_factory=itertools.count)
    """work.py: tags of messages."""
    hosts: tuple[str, ...] | None = None
    """ranks.py: the host of every rank, once asked."""
    links: dict[str, Any] = field(default_factory=dict)
    """links.py: `Links`, once measured, by the type of a device."""
    shared: Any = None
    """shared/: a `SharedMemory`, or a text that says why there is none."""
    symmetric: Any = None
    """symmetric.py: a `SymmetricMemory`, or a text that says why there is none."""
    bound: dict[tuple, Any] = field(default_factory=dict)
    """ranks.py: (type of a device, TreeConfig) -> `Ranks`."""
    tuned: dict[tuple, Any] = field(default_factory=dict)
    """attention/tuning.py: kinds of calls -> the plan that was measured to be the fastest."""
    planned: Recent = field(default_factory=lambda: Recent(64))
    """attention/: calls that are planned, by what they depend on."""
    counted: Recent = field(default_factory=lambda: Recent(256))
    """attention/tuning.py: kinds of calls without a backward -> how many there were; the latest kind last."""
    agreed: Recent = field(default_factory=lambda: Recent(4096))
    """agreement.py: what all ranks have agreed on, or trust in -> its digest; the oldest first."""
    calls: CallRecord = field(default_factory=CallRecord)
    """agreement.py: the calls that this rank has made."""
    watchdog: Any = None
    """watchdog.py: a `Watchdog`."""
    store: Any = None
    """store.py: a `StoreClient`; of the default group alone."""
    region: str = ""
    """watchdog.py: the `monitored` region that the job is in; of the default group alone."""
    wait_limit_s: float = math.inf
    """watchdog.py: of a single wait in that region; of the default group alone."""

    @classmethod
    def of(cls, group) -> GroupState:
        """Raises ``ValueError`` if this rank is not a member of the group. None means a single rank."""
        if group is None:
            return _ALONE
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise _not_a_member()
        if (state := _states.get(weakref.ref(group))) is None:
            if dist.get_rank(group) < 0:
                raise _not_a_member()
            ranks = tuple(dist.get_process_group_ranks(group))
            config = dist.get_backend_config(group)  # unlike get_backend, also where the user has named none
            state = cls(len(ranks), dist.get_rank(group), dict(x.split(":") for x in config.split(",")), ranks)
            state.calls.of_parent = weakref.ref(group) in _of_parent and state.size > 1
            _states[weakref.ref(group, _states.pop)] = state
        return state


IN_PART: contextvars.ContextVar[bool] = contextvars.ContextVar("tree_part_of_call", default=False)
"""agreement.py: whether what runs is part of a call that this rank is in already."""
_ALONE = GroupState(1, 0, {}, (0,))
_states: dict[weakref.ref, GroupState] = {}  # by group; a WeakKeyDictionary would take a function call more to look up
_of_parent: set[weakref.ref] = set()  # groups of the process that forked this one


def _note_fork() -> None:
    _of_parent.update(map(weakref.ref, distributed_c10d._world.pg_map))
    for state in _states.values():
        state.calls.of_parent = state.size > 1


os.register_at_fork(after_in_child=_note_fork)


def _not_a_member() -> ValueError:
    return ValueError(f"cp_group: rank {dist.get_rank()} is not a member of it; pass the group this rank belongs to")


def states() -> list[GroupState]:
    """Of all groups that are in use; from any thread."""
    return list(_states.values())


def region() -> str:
    """For messages, in a `monitored` region: ", in step 5"."""
    region = GroupState.of(dist.group.WORLD).region
    return f", in {region}" if region else ""


def wait_limit(timeout_s: float = math.inf) -> float:
    """timeout_s, or the `monitored` region's limit of a single wait where that is less."""
    return min(timeout_s, GroupState.of(dist.group.WORLD).wait_limit_s)


def group_size(group) -> int:
    """Number of ranks in `group`; None means a single rank."""
    return GroupState.of(group).size


def group_rank(group) -> int:
    """This rank's number in `group`. Raises ``ValueError`` where it is not a member."""
    return GroupState.of(group).rank
