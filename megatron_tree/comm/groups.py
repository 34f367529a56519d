"""Who is in a group, and how messages to them travel."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist


class Sent(NamedTuple):
    """One operation of this rank: its name, the ranks that take part, and the payload bytes this rank sends."""

    op: str
    ranks: int
    bytes: int


_recorders: list[list[Sent]] = []


@contextlib.contextmanager
def record():
    """A list that fills with every operation of this rank while the context is open."""
    log: list[Sent] = []
    _recorders.append(log)
    try:
        yield log
    finally:
        _recorders.remove(log)


def note(op: str, ranks: int, num_bytes: int) -> None:
    """Tell the open records of an operation."""
    for log in _recorders:
        log.append(Sent(op, ranks, num_bytes))


class _Facts(NamedTuple):
    size: int
    rank: int
    backend: str


_facts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # torch takes its time to tell


def _facts_of(group) -> _Facts:
    if group is None:
        return _Facts(1, 0, "gloo")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise _not_a_member()
    if (found := _facts.get(group)) is None:
        if dist.get_rank(group) < 0:
            raise _not_a_member()
        found = _Facts(dist.get_world_size(group), dist.get_rank(group), dist.get_backend(group))
        _facts[group] = found
    return found


def _not_a_member() -> ValueError:
    return ValueError(f"cp_group: rank {dist.get_rank()} is not a member of it; pass the group this rank belongs to")


def group_size(group) -> int:
    """Ranks in `group`; None stands for one rank alone."""
    return _facts_of(group).size


def group_rank(group) -> int:
    """This rank's number in `group`. Raises ``ValueError`` where it is not a member."""
    return _facts_of(group).rank


def backend(group) -> str:
    """The group's backend, "gloo" or "nccl"; "gloo" for one rank alone."""
    return _facts_of(group).backend


def resolve_transport(group, device, transport: str = "auto") -> str:
    """How messages travel: "direct" (point-to-point, receives posted early) or "builtin" (the backend's collectives).

    "auto" is direct with gloo on the CPU, whose collectives wait for every message in turn, and builtin elsewhere.
    Raises ``ValueError`` where "direct" is asked for and can't be had.
    """
    if group is None:
        return "direct"
    gloo = device.type == "cpu" and backend(group) == "gloo"
    if transport == "direct" and not gloo:
        raise ValueError(
            f"transport='direct' needs gloo and tensors on the CPU; this group has {backend(group)} and "
            f"tensors on {device.type}: use transport='builtin' or 'auto'"
        )
    return transport if transport != "auto" else "direct" if gloo else "builtin"


def from_next(ranks: tuple[int, ...], own: int) -> tuple[int, ...]:
    """All others, beginning with the next one: not everybody sends to the same rank first."""
    return ranks[own + 1 :] + ranks[:own]


@dataclass(frozen=True)
class Team:
    """Ranks of a group that work together: a row or a column of the grid, as `inner` ranks of each of `outer` nodes.

    `ranks[i][o]` is the group rank with place i on node o of the team; what they gather is laid out in this order,
    place by place. A collective over a team whose both factors are above 1 has two levels: across nodes, among ranks
    of the same place, and inside the node.
    """

    group: object
    ranks: tuple[tuple[int, ...], ...]
    transport: str
    timeout_s: float
    name: tuple = ()
    """What all ranks of the group call their teams of this kind, for instance ("row", (2, 4), (1, 2))."""

    @classmethod
    def flat(cls, group, *, transport: str, timeout_s: float) -> Team:
        """The whole group, in rank order, in one level."""
        return cls(group, (tuple(range(group_size(group))),), transport, timeout_s)

    @property
    def inner(self) -> int:
        return len(self.ranks)

    @property
    def outer(self) -> int:
        return len(self.ranks[0])

    @property
    def size(self) -> int:
        return self.inner * self.outer

    @property
    def order(self) -> tuple[int, ...]:
        """The team's ranks in the order of a gathered tensor."""
        return tuple(r for place in self.ranks for r in place)

    @property
    def place(self) -> tuple[int, int]:
        """(i, o) of this rank: ranks[i][o] is this rank."""
        return divmod(self.order.index(group_rank(self.group)), self.outer)

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks of this rank's place on all nodes of the team."""
        return self.ranks[self.place[0]]

    @property
    def inside(self) -> tuple[int, ...]:
        """The team's ranks on this rank's node."""
        o = self.place[1]
        return tuple(place[o] for place in self.ranks)


_subgroups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> {(name, ranks): sub-group}


def subgroup(team: Team, ranks: tuple[int, ...]):
    """The process group of some ranks of a team, this one among them, in rising order; made once, by its members.

    torch derives a sub-group's identity from its ranks and from how many groups a rank has made, so every rank of the
    group must make as many: one for each name and level, also where it has one of the same ranks.
    """
    ranks = tuple(sorted(ranks))
    if len(ranks) == group_size(team.group):
        return team.group
    made = _subgroups.setdefault(team.group, {})
    if (team.name, ranks) not in made:
        world = dist.get_process_group_ranks(team.group)
        make = functools.partial(
            dist.new_group,
            [world[r] for r in ranks],
            backend=dist.get_backend(team.group),
            timeout=timedelta(seconds=team.timeout_s),
            use_local_synchronization=True,
        )
        made[team.name, ranks] = _in_time(make, team.timeout_s)
    return made[team.name, ranks]


def _in_time(make, timeout_s: float):
    """make(), in a thread of its own: torch waits without a limit for a store whose keeper is stopped."""
    answer: Future = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def work():
        try:
            if device is not None:
                torch.cuda.set_device(device)
            answer.set_result(make())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="megatron_tree new group", daemon=True).start()
    try:
        return answer.result(timeout_s + 0.2)  # torch's own error, which comes first, says more
    except TimeoutError:
        raise RuntimeError(f"a group of some of the ranks was not made within {timeout_s:g} s") from None
