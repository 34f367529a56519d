"""A process group, and what this process keeps about it."""

from __future__ import annotations

import contextvars
import itertools
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from .call_record import CallRecord


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
            _states[weakref.ref(group, _states.pop)] = state
        return state


IN_PART: contextvars.ContextVar[bool] = contextvars.ContextVar("tree_part_of_call", default=False)
"""agreement.py: whether what runs is part of a call that this rank is in already."""
_ALONE = GroupState(1, 0, {}, (0,))
_states: dict[weakref.ref, GroupState] = {}  # by group; a WeakKeyDictionary would take a function call more to look up


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
