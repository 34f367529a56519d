"""Teams: the ranks that gather keys or queries together, nested by node, and their process groups."""

from __future__ import annotations

import functools
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from .ranks import Ranks


@dataclass(frozen=True)
class Team:
    """Ranks that gather together: a key team or a query team, `inner` ranks of each of `outer` nodes.

    `places[i][o]` is the rank with place i on node o of the team; what they gather is laid out in this order, place by
    place. A collective over a team whose both factors are above 1 has two levels: across nodes, among ranks of the same
    place, and inside the node.
    """

    ranks: Ranks
    places: tuple[tuple[int, ...], ...]
    name: tuple = ()
    """What all ranks of the group call their teams of this kind, for instance ("keys", (2, 4), (1, 2))."""
    in_memory: bool = False
    """Whether messages go through the ranks' shared memory; of all ranks only."""

    @functools.cached_property
    def transport(self) -> str:
        return "shm" if self.in_memory else self.ranks.transport

    @functools.cached_property
    def inner(self) -> int:
        return len(self.places)

    @functools.cached_property
    def outer(self) -> int:
        return len(self.places[0])

    @functools.cached_property
    def size(self) -> int:
        return self.inner * self.outer

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The team's ranks in the order of a gathered tensor."""
        return tuple(r for place in self.places for r in place)

    @functools.cached_property
    def index(self) -> int:
        """This rank's index in `order`."""
        return self.order.index(self.ranks.rank)

    @functools.cached_property
    def place(self) -> tuple[int, int]:
        """(i, o) of this rank: places[i][o] is this rank."""
        return divmod(self.index, self.outer)

    @functools.cached_property
    def across(self) -> tuple[int, ...]:
        """The ranks of this rank's place on all nodes of the team."""
        return self.places[self.place[0]]

    @functools.cached_property
    def inside(self) -> tuple[int, ...]:
        """The team's ranks on this rank's node."""
        o = self.place[1]
        return tuple(place[o] for place in self.places)


def subgroup(team: Team, ranks: tuple[int, ...]):
    """The process group of some ranks of a team, this one among them, in rising order; made once, by its members.

    torch derives a sub-group's identity from its ranks and from how many groups a rank has made. So every rank of the
    group must make the same number of them: one for each name and level, even if it has one of the same ranks already.
    They are freed with the team's group. All ranks have one already; where NCCL's kernels have no priority in it, the
    named teams of all, which compute meanwhile, share another.
    """
    whole, ranks, name = team.ranks, tuple(sorted(ranks)), team.name
    if len(ranks) == whole.size:
        if not name or not _waits_its_turn(whole):
            return whole.group
        name = ("all",)
    made = whole.state.subgroups
    if not made:
        weakref.finalize(whole.group, _free, made).atexit = False
    if (name, ranks) not in made:
        make = functools.partial(_new_group, whole, ranks, f"megatron_tree {name}")
        made[name, ranks] = in_time(make, whole.timeout_s, "a group of some of the ranks")
    return made[name, ranks]


def _new_group(whole: Ranks, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
    """A process group of some of the ranks, by this name in torch's log; with NCCL its kernels have priority over those
    that compute.

    If the default group is bound to a device, `new_group` would split its NCCL communicator, for which all of its ranks
    have to call, not only these. So the ranks' own is split, for which all of them do call: NCCL tells the parts apart
    by the ranks that each one names.
    """
    backend = "nccl" if "nccl" in whole.state.backends.values() else "gloo"  # one of the group's, whatever a call needs
    options = dict(timeout=whole.limit, pg_options=options_of_group(backend, whole.limit), group_desc=name)
    if backend == "nccl" and dist.group.WORLD.bound_device_id is not None:
        return dist.split_group(whole.group, [list(ranks)], **options)
    return dist.new_group(
        [whole.state.ranks[r] for r in ranks],
        backend=dist.get_backend(whole.group),
        use_local_synchronization=True,
        **options,
    )


def _waits_its_turn(ranks: Ranks) -> bool:
    """Whether the group's NCCL kernels start only where those of attention, queued before, leave a multiprocessor."""
    return ranks.backend == "nccl" and not ranks.group._get_backend(ranks.device).options.is_high_priority_stream


def options_of_group(backend: str, limit: timedelta):
    """The `pg_options` of a new group: NCCL's kernels come first where those of attention wait for a multiprocessor."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = limit
    return options


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


def in_time(make, limit_s: float, what: str):
    """make(), in its own thread: torch waits without a time limit for a store whose process is stopped. what it makes,
    for the ``RuntimeError`` after that time."""
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
        return answer.result(limit_s + 0.2)  # torch's own error, which comes first, says more
    except TimeoutError:
        raise RuntimeError(f"{what} was not made within {limit_s:g} s") from None
