"""The topology of a process group: the network that the planner assumes, and the positions of the group's ranks."""

from __future__ import annotations

import dataclasses
import zlib
from typing import NamedTuple

import torch

from .. import comm
from ..comm.group import GroupState
from ..config import TreeConfig
from ..log import say_once
from ..plan import Placement, Topology, default_topology, load_topology, place


class GroupTopology(NamedTuple):
    """The network that the planner assumes; `topology.transport` is the transport that is actually used."""

    topology: Topology
    fingerprint: str
    """Name and checksum of the topology, as it is before anything is measured: files with the same name may differ
    between hosts."""
    placement: Placement | None = None

    @classmethod
    def of(cls, group, device: torch.device, config: TreeConfig) -> GroupTopology:
        """The topology of a group; `placed` adds the placement. Raises ``ValueError``."""
        made, key = GroupState.of(group).topologies, cls._key(device, config)
        if key in made:
            return made[key]
        backend = comm.backend(group, device)
        topology = default_topology(backend) if config.topology is None else load_topology(config.topology)
        wanted = config.transport
        if wanted == "auto" and config.topology is not None and topology.transport == "builtin":
            wanted = "builtin"  # measured, or meant for another backend
        topology = dataclasses.replace(topology, transport=comm.resolve_transport(group, device, wanted))
        return cls(topology, f"{topology.name} ({zlib.crc32(repr(topology).encode()):08x})")

    def placed(self, group, device: torch.device, config: TreeConfig) -> GroupTopology:
        """The same with the placement of the ranks, and with what their links are measured to be where the user leaves
        that open. Collective at the group's first call, by ranks that have agreed on config."""
        if self.placement is not None:
            return self
        hosts, topology = comm.hosts(group, timeout_s=config.timeout_s), self.topology
        if _is_measured(config) and len(hosts) > 1:
            links = comm.measured_links(group, device, timeout_s=config.timeout_s)
            topology = _measured(topology, links)
            if comm.group_rank(group) == 0:
                say_once(f"measured: {links}")
        placed = self._replace(topology=topology, placement=place(topology, hosts))
        GroupState.of(group).topologies[self._key(device, config)] = placed
        return placed

    @classmethod
    def over_cache(cls, group, device: torch.device, config: TreeConfig) -> GroupTopology:
        """`of` and `placed`, for collectives over a cache: their transport is "shm" where the ranks share memory.

        Collective at the group's first call. Raises ``ValueError`` where that is asked for and can't be had.
        """
        made, key = GroupState.of(group).topologies, (*cls._key(device, config), "cache")
        if key not in made:
            net = cls.of(group, device, config).placed(group, device, config)
            if comm.resolve_shared(group, device, config.transport, timeout_s=config.timeout_s) == "shm":
                net = net._replace(topology=dataclasses.replace(net.topology, transport="shm"))
            made[key] = net
        return made[key]

    @staticmethod
    def _key(device: torch.device, config: TreeConfig) -> tuple:
        return config.topology, config.transport, device.type, _is_measured(config)


def _is_measured(config: TreeConfig) -> bool:
    return config.topology is None and config.tune and not config.deterministic


def _measured(assumed: Topology, links: comm.Links) -> Topology:
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
