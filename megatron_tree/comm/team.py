"""Teams: the ranks that gather keys or queries together, nested by node, and their process groups."""

from __future__ import annotations

import functools
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .group import GroupState, group_rank, group_size


def from_next(ranks: tuple[int, ...], index: int) -> tuple[int, ...]:
    """All ranks but ranks[index], starting with the next one, so that not all ranks send to the same rank first."""
    return ranks[index + 1 :] + ranks[:index]


@dataclass(frozen=True)
class Team:
    """Ranks of a group that gather together: a key team or a query team, `inner` ranks of each of `outer` nodes.

    `ranks[i][o]` is the group rank with place i on node o of the team; what they gather is laid out in this order,
    place by place. A collective over a team whose both factors are above 1 has two levels: across nodes, among ranks
    of the same place, and inside the node.
    """

    group: object
    ranks: tuple[tuple[int, ...], ...]
    transport: str
    timeout_s: float
    name: tuple = ()
    """What all ranks of the group call their teams of this kind, for instance ("keys", (2, 4), (1, 2))."""

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

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The team's ranks in the order of a gathered tensor."""
        return tuple(r for place in self.ranks for r in place)

    @functools.cached_property
    def index(self) -> int:
        """This rank's index in `order`."""
        return self.order.index(group_rank(self.group))

    @property
    def place(self) -> tuple[int, int]:
        """(i, o) of this rank: ranks[i][o] is this rank."""
        return divmod(self.index, self.outer)

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks of this rank's place on all nodes of the team."""
        return self.ranks[self.place[0]]

    @property
    def inside(self) -> tuple[int, ...]:
        """The team's ranks on this rank's node."""
        o = self.place[1]
        return tuple(place[o] for place in self.ranks)


def subgroup(team: Team, ranks: tuple[int, ...]):
    """The process group of some ranks of a team, this one among them, in rising order; made once, by its members.

    torch derives a sub-group's identity from its ranks and from how many groups a rank has made. So every rank of the
    group must make the same number of them: one for each name and level, even if it has one of the same ranks already.
    They are freed with the team's group.
    """
    ranks = tuple(sorted(ranks))
    if len(ranks) == group_size(team.group):
        return team.group
    made = GroupState.of(team.group).subgroups
    if not made:
        weakref.finalize(team.group, _free, made).atexit = False
    if (team.name, ranks) not in made:
        ranks_in_job = GroupState.of(team.group).ranks
        make = functools.partial(
            dist.new_group,
            [ranks_in_job[r] for r in ranks],
            backend=dist.get_backend(team.group),
            timeout=timedelta(seconds=team.timeout_s),
            use_local_synchronization=True,
        )
        made[team.name, ranks] = _in_time(make, team.timeout_s)
    return made[team.name, ranks]


def _free(made: dict[tuple, dist.ProcessGroup]) -> None:
    """End the sub-groups of a group that is gone: each has connections and threads."""
    world = distributed_c10d._world
    for group in made.values():
        if group in world.pg_map:  # else all of the process's groups were destroyed
            name = world.pg_names[group]
            dist.destroy_process_group(group)
            world.pg_names[_Former()] = name
    made.clear()


class _Former:
    """Keeps a freed group counted: torch names the next one by how many there are, and one with the name of a former
    one would find that one's addresses in the store."""

    def shutdown(self) -> None:
        """torch calls this, or `abort`, where it destroys all groups."""

    abort = shutdown


def neighbours(group, size: int, *, timeout_s: float):
    """The process group of this rank and its neighbours, if a group is cut into runs of `size` ranks; None for one.

    Made once. All ranks of the group must call it.
    """
    if size == 1:
        return None
    first = group_rank(group) // size * size
    team = Team(group, ((first,),), "auto", timeout_s, ("neighbours", size))
    return subgroup(team, tuple(range(first, first + size)))


def _in_time(make, timeout_s: float):
    """make(), in its own thread: torch waits without a time limit for a store whose process is stopped."""
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
