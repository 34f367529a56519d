"""`Ranks`: a process group as calls see it, and the collectives of all of its ranks."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import weakref
import zlib
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..config import TreeConfig, default_config
from ..merge import SumReducer
from ..plan import Placement, Topology, default_topology, load_topology, place
from ..plan.decode import SMALL_SUM
from . import shared, symmetric
from .agreement import CollectiveCall, gather
from .collectives import start_all_to_all_v, start_gather, start_reduce_scatter
from .group import GroupState
from .links import Links, measured_links
from .shared import SUMS, SharedMemory
from .symmetric import SymmetricMemory
from .team import Team, subgroup
from .watchdog import Watchdog
from .work import Mail, meet, note, run


class Network(NamedTuple):
    """What the planner knows of the ranks."""

    topology: Topology
    """Its transport is the one that is used."""
    placement: Placement


class Ranks:
    """The ranks of a process group as calls see them: this rank's number, how messages travel, how long to wait for
    them, and the network. Bound once for a group, a type of device and a `TreeConfig`.

    It does not keep the group alive.
    """

    def __init__(self, group, device_type: str, config: TreeConfig):
        self.state = GroupState.of(group)
        self.size, self.rank, self.device_type, self.config = self.state.size, self.state.rank, device_type, config
        self.timeout_s = config.timeout_s
        self._group = (lambda: None) if group is None else weakref.ref(group)

    @classmethod
    def of(
        cls,
        group,
        device: torch.device | None = None,
        config: TreeConfig | None = None,
        *,
        limit_s: float | None = None,
    ) -> Ranks:
        """group: None for one rank alone. device: of the tensors; default: any that the group carries, a CPU first.
        config: default: `default_config()`. limit_s: in place of its time limit.

        Raises ``ValueError`` if this rank is not in the group.
        """
        bound, config = GroupState.of(group).bound, config or default_config()
        if limit_s is not None:
            config = dataclasses.replace(config, timeout_s=limit_s)
        kind = device.type if device is not None else _any_device(group)
        if (ranks := bound.get((kind, config))) is None:
            ranks = bound[kind, config] = cls(group, kind, config)
        return ranks

    @property
    def group(self):
        return self._group()

    @property
    def on_host(self) -> Ranks:
        """The same for tensors on the CPU."""
        return Ranks.of(self.group, torch.device("cpu"), self.config)

    @property
    def device(self) -> torch.device:
        """Of this rank's tensors."""
        return torch.device(self.device_type, torch.cuda.current_device() if self.device_type == "cuda" else None)

    @property
    def watchdog(self) -> Watchdog:
        """What finds out which rank failed; made within the time limit."""
        return self.state.watchdog or Watchdog.of(self.group, self.timeout_s)

    @functools.cached_property
    def limit(self) -> timedelta:
        """`timeout_s`."""
        return timedelta(seconds=self.timeout_s)

    # how messages travel

    @functools.cached_property
    def backend(self) -> str:
        """The group's backend for tensors on such a device, "gloo" or "nccl"; "gloo" for one rank alone.

        Raises ``ValueError`` where the group has none for such tensors.
        """
        backends = self.state.backends
        if self._group() is None:
            return "gloo"
        if self.device_type not in backends:
            known = ", ".join(f"{name} for {kind}" for kind, name in backends.items())
            raise ValueError(
                f"cp_group: no backend of this group carries tensors on {self.device_type}, only {known}: make it with "
                'one, for instance dist.init_process_group("cpu:gloo,cuda:nccl")'
            )
        return backends[self.device_type]

    @functools.cached_property
    def transport(self) -> str:
        """How messages travel: "direct" (point-to-point, receives posted early) or "builtin" (the backend's own).

        Where the user leaves it open, direct with gloo on the CPU, whose collectives wait for every message in turn,
        and builtin elsewhere, or where a topology that is named says so: that was measured, or is another backend's.
        Raises ``ValueError`` where another one is asked for that the group's backend does not have.
        """
        wanted, named = self.config.transport, self.config.topology
        return "builtin" if wanted == "auto" and named and self._assumed.transport == "builtin" else self._messages

    @functools.cached_property
    def _messages(self) -> str:
        """`transport`, whatever topology is named."""
        wanted = self.config.transport
        if self._group() is None:
            return "direct"
        gloo = self.device_type == "cpu" and self.backend == "gloo"
        if wanted in ("direct", "shm") and not gloo:
            raise ValueError(
                f"transport={wanted!r} needs gloo and tensors on the CPU; this group has {self.backend} for tensors on "
                f"{self.device_type}: use transport='builtin' or 'auto'"
            )
        if wanted == "symm_mem" and self.backend != "nccl":
            raise ValueError(
                f"transport='symm_mem' needs NCCL and tensors on GPUs; this group has {self.backend} for tensors on "
                f"{self.device_type}: use transport='auto'"
            )
        return "direct" if gloo and wanted != "builtin" else "builtin"

    @functools.cached_property
    def memory(self) -> SharedMemory | None:
        """The memory that the ranks share for small collectives, where they can. Collective at the group's first call.

        Raises: ``ValueError`` where transport is "shm" and it can't be had; `CommError`.
        """
        if self.size == 1 or self._messages != "direct" or self.config.transport == "direct":
            return None
        if self.state.shared is None:
            self.state.shared = shared.join(self)
        return self._had("shm", self.state.shared, SharedMemory)

    @functools.cached_property
    def symmetric(self) -> SymmetricMemory | None:
        """The memory of GPUs in which ranks read each other's partial results, where they can. Collective at the
        group's first call.

        Raises: ``ValueError`` where transport is "symm_mem" and it can't be had; `CommError`.
        """
        if self.size == 1 or self.backend != "nccl" or self.config.transport == "builtin":
            return None
        if self.state.symmetric is None:
            self.state.symmetric = symmetric.join(self)
        return self._had("symm_mem", self.state.symmetric, SymmetricMemory)

    def _had(self, transport: str, memory, kind: type):
        """memory, where it is of that kind; else it is the text that says why not."""
        if isinstance(memory, kind):
            return memory
        if self.config.transport == transport:
            other = self._messages
            raise ValueError(f"transport={transport!r} can't be had: {memory}; use transport='auto' or {other!r}")
        return None

    # the network

    @functools.cached_property
    def _assumed(self) -> Topology:
        named = self.config.topology
        return default_topology(self.backend) if named is None else load_topology(named)

    @functools.cached_property
    def topology(self) -> Topology:
        """The network that the planner assumes, before anything is measured. Raises ``ValueError``."""
        return dataclasses.replace(self._assumed, transport=self.transport)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Name and checksum of the topology: files with the same name may differ between hosts."""
        return f"{self.topology.name} ({zlib.crc32(repr(self.topology).encode()):08x})"

    @functools.cached_property
    def network(self) -> Network:
        """The topology, with what links are measured to be where the user leaves that open, and the ranks' places.
        Collective at the group's first call, by ranks that have agreed on config."""
        topology, hosts = self.topology, self.hosts
        if self.measures and self.size > 1:
            topology = _measured(topology, measured_links(self))
        return Network(topology, place(topology, hosts))

    @functools.cached_property
    def network_of_memory(self) -> Network:
        """`network`, whose transport is "shm" or "symm_mem" where the ranks have such memory: for collectives over a
        cache."""
        network = self.network
        if self.memory is None and self.symmetric is None:
            return network
        transport = "shm" if self.memory is not None else "symm_mem"
        return network._replace(topology=dataclasses.replace(network.topology, transport=transport))

    @property
    def measures(self) -> bool:
        """Whether the user leaves the network to measurements."""
        return self.config.topology is None and self.config.tune and not self.config.deterministic

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of every rank; ranks are on one host when these are equal. Asked once per group.

        A host is a name and a network namespace: containers with the same name but separate networks are different
        hosts. Raises `CommError` naming the ranks that did not answer in time.
        """
        if self.size == 1:
            return (_this_host(),)
        if self.state.hosts is None:
            self.state.hosts = tuple(gather(self.watchdog, "host", _this_host(), self.timeout_s))
        return self.state.hosts

    @property
    def by_host(self) -> list[list[int]]:
        """The ranks on each host, hosts in the order of their first rank."""
        members: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            members.setdefault(host, []).append(rank)
        return list(members.values())

    # some of the ranks

    @functools.cached_property
    def everyone(self) -> Team:
        """All ranks, in rank order, in one level; through messages."""
        return Team(self, (tuple(range(self.size)),))

    @functools.cached_property
    def everyone_in_memory(self) -> Team:
        """`everyone`, through the memory that they share, if they do. Collective as `memory`."""
        return Team(self, self.everyone.places, in_memory=self.memory is not None)

    def neighbours(self, size: int):
        """The process group of this rank and its neighbours, if the ranks are cut into runs of `size`; None for one.

        Made once. All ranks must call it.
        """
        if size == 1:
            return None
        first = self.rank // size * size
        return subgroup(Team(self, ((first,),), ("neighbours", size)), tuple(range(first, first + size)))

    # calls

    def call(self, name: str, *, differentiable: bool = False) -> CollectiveCall:
        """The context of a call that all ranks make together."""
        return CollectiveCall(name, self, differentiable=differentiable)

    def meet(self, name: str) -> None:
        """Wait until all ranks are here, in a call of this name; with NCCL, for which the host does not wait, nobody
        does. For collectives of other libraries that come next, without a limit of ours.

        Raises: `CommError` naming the ranks that don't come in time; ``ValueError`` if they make another call.
        """
        with self.call(name) as call:
            call.start()
            if self.state.backends.get("cpu") == "gloo":
                meet(name, self.on_host)

    # collectives of all

    def gather(self, x: Tensor) -> Tensor:
        """All-gather x [s, ...], of equal length on all ranks, to [n * s, ...] in rank order."""
        if self.size == 1:
            return x.contiguous()
        return start_gather(x, self.everyone_in_memory).wait()

    def gather_rows(self, x: Tensor, counts: tuple[int, ...], *, exchanged: bool = False) -> Tensor:
        """x [counts[rank], ...], contiguous, of every rank -> [sum(counts), ...], in rank order.

        exchanged: built-in, by an all-to-all: more messages than an all-gather sends, but all at once.
        """
        if self.size == 1:
            return x
        if self.memory is not None:
            return self.memory.gather_rows(x, counts, self)
        if exchanged and self.transport == "builtin":
            return start_all_to_all_v([x] * self.size, counts, self.everyone).wait()
        longest = max(counts)  # messages are of one size
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, longest - len(x))) if len(x) < longest else x
        whole = self.gather(padded)
        if min(counts) == longest:
            return whole
        return torch.cat([part[:n] for part, n in zip(whole.split(longest), counts)])

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x, of equal shape, over all ranks: the same bits everywhere. It may be x itself.

        Unless the transport is builtin floats are added up in rank order, in fp32 at least, so a row's bits don't
        depend on the batch either.
        """
        if self.size == 1:
            return x
        if self.memory is not None and x.dtype in SUMS:
            return self.memory.sum(x.contiguous(), self)
        if self.transport == "builtin":
            return self.reduce(x.contiguous())
        team, dtype = self.everyone_in_memory, x.dtype
        reducer = SumReducer(dtype, torch.promote_types(dtype, torch.float32) if x.is_floating_point() else dtype)
        if self.size == 2 or x.nbytes <= SMALL_SUM:  # one round of whole tensors, or two of shares
            return reducer.merge(start_gather(x[None], team).wait()).to(dtype)
        rows = F.pad(x.flatten(), (0, -x.numel() % self.size))
        mine = reducer.narrow(start_reduce_scatter(rows, team, reducer).wait())
        return start_gather(mine, team).wait()[: x.numel()].view(x.shape)

    def reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Reduce x in place, by the backend: op "sum" or "max"."""
        if self.size > 1:
            reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
            start = functools.partial(dist.all_reduce, op=reduce_op, group=self.group, async_op=True)
            run("all_reduce", self, 2 * (self.size - 1) * x.nbytes // self.size, start, x)
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x, contiguous, of rank `source` on all ranks, in place."""
        if self.size == 1:
            return x
        if self.memory is not None:
            self.memory.broadcast(x, source, self)
        elif self.transport == "direct":
            self._broadcast_direct(x, source)
        else:
            sent = x.nbytes if self.rank == source else 0
            start = functools.partial(dist.broadcast, group=self.group, group_src=source, async_op=True)
            run("broadcast", self, sent, start, x)
        return x

    def _broadcast_direct(self, x: Tensor, source: int) -> None:
        """A binomial tree: in round k the first 2^k ranks, counted from source, send to the next 2^k."""
        n, at = self.size, (self.rank - source) % self.size
        mail, rounds = Mail("broadcast", self), range(at.bit_length(), (n - 1).bit_length())
        if at:
            parent = at - (1 << at.bit_length() - 1)
            mail.wait(mail.receive(x, (source + parent) % n))
        children = [at + (1 << k) for k in rounds if at + (1 << k) < n]
        note("broadcast", n, len(children) * x.nbytes)
        for child in children:
            mail.send(x, (source + child) % n)
        mail.sent()


def _any_device(group) -> str:
    """A type of device whose tensors a group carries."""
    backends = GroupState.of(group).backends
    return "cpu" if not backends or "cpu" in backends else next(iter(backends))


def _measured(assumed: Topology, links: Links) -> Topology:
    """The assumed topology with the measured latencies and bandwidths of the levels that the group spans: the first one
    is inside a host, the last one joins hosts."""
    levels = list(assumed.levels)
    for at, link in ((0, links.inside), (-1, links.between)):
        if link is not None:
            latency_s = max(link.seconds - assumed.overhead_s, min(link.seconds / 2, levels[at].latency_s))
            levels[at] = dataclasses.replace(
                levels[at], latency_s=latency_s, bandwidth=link.bandwidth, port_bandwidth=link.port_bandwidth
            )
    return dataclasses.replace(assumed, name="measured", levels=tuple(levels))


def _this_host() -> str:
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()
