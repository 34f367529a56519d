"""A process group, and what this process keeps about it."""

from __future__ import annotations

import contextvars
import itertools
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .call_record import CallRecord


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
    """machines.py: the host of every rank, once asked."""
    links: dict[str, Any] = field(default_factory=dict)
    """links.py: `Links`, once measured, by the type of a device."""
    shared: Any = None
    """shared/: a `SharedMemory`, or a text that says why there is none."""
    transports: dict[tuple[str, str], str] = field(default_factory=dict)
    """shared/: (type of a device, transport asked for) -> how small collectives travel."""
    topologies: dict[tuple, Any] = field(default_factory=dict)
    """attention/topology.py."""
    tuned: dict[tuple, Any] = field(default_factory=dict)
    """attention/tuning.py: kinds of calls -> the plan that was measured to be the fastest."""
    counted: dict[tuple, int] = field(default_factory=dict)
    """attention/tuning.py: kinds of calls without a backward -> how many there were; the latest kind last."""
    agreed: dict[tuple, int] = field(default_factory=dict)
    """calls.py: what all ranks have agreed on, or trust in -> its digest; the oldest first."""
    calls: CallRecord = field(default_factory=CallRecord)
    """calls.py: the calls that this rank has made."""
    watchdog: Any = None
    """health/watchdog.py: a `Watchdog`."""
    store: Any = None
    """health/store.py: a `StoreClient`; of the default group alone."""
    region: str = ""
    """health/watchdog.py: the `monitored` region that the job is in; of the default group alone."""
    wait_limit_s: float = math.inf
    """health/monitored.py: of a single wait in that region; of the default group alone."""

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
"""calls.py: whether what runs is part of a call that this rank is in already."""
_ALONE = GroupState(1, 0, {}, (0,))
_states: dict[weakref.ref, GroupState] = {}  # by group; a WeakKeyDictionary would take a function call more to look up


def _not_a_member() -> ValueError:
    return ValueError(f"cp_group: rank {dist.get_rank()} is not a member of it; pass the group this rank belongs to")


def wait_limit(timeout_s: float = math.inf) -> float:
    """timeout_s, or the `monitored` region's limit of a single wait where that is less."""
    return min(timeout_s, GroupState.of(dist.group.WORLD).wait_limit_s)


def group_size(group) -> int:
    """Number of ranks in `group`; None means a single rank."""
    return GroupState.of(group).size


def group_rank(group) -> int:
    """This rank's number in `group`. Raises ``ValueError`` where it is not a member."""
    return GroupState.of(group).rank


def backend(group, device: torch.device) -> str:
    """The group's backend for tensors on a device, "gloo" or "nccl"; "gloo" for None, one rank alone.

    Raises ``ValueError`` where the group has none for such tensors.
    """
    if group is None:
        return "gloo"
    backends = GroupState.of(group).backends
    if device.type not in backends:
        known = ", ".join(f"{name} for {kind}" for kind, name in backends.items())
        raise ValueError(
            f"cp_group: no backend of this group carries tensors on {device.type}, only {known}: make it with one, for "
            'instance dist.init_process_group("cpu:gloo,cuda:nccl")'
        )
    return backends[device.type]


def resolve_transport(group, device, transport: str = "auto") -> str:
    """How messages travel: "direct" (point-to-point, receives posted early) or "builtin" (the backend's collectives).

    "auto" is direct with gloo on the CPU, whose collectives wait for every message in turn, and builtin elsewhere. What
    may go through shared memory ("auto" and "shm") is direct here; `shared.resolve_shared` says whether it does.
    Raises ``ValueError`` where "direct" or "shm" is asked for and can't be had.
    """
    if group is None:
        return "direct"
    name = backend(group, device)
    gloo = device.type == "cpu" and name == "gloo"
    if transport in ("direct", "shm") and not gloo:
        raise ValueError(
            f"transport={transport!r} needs gloo and tensors on the CPU; this group has {name} for "
            f"tensors on {device.type}: use transport='builtin' or 'auto'"
        )
    return "direct" if gloo and transport != "builtin" else "builtin"
