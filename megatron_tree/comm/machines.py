"""The host on which every rank of a group runs."""

from __future__ import annotations

import os
import socket

from .group import GroupState
from .health.agreement import gather
from .health.watchdog import Watchdog


def hosts(group, *, timeout_s: float = 600.0) -> tuple[str, ...]:
    """The host of every rank of the group; ranks are on one host when these are equal. Asked once per group.

    A host is a name and a network namespace: containers with the same name but separate networks are different hosts.
    Raises `CommError` naming the ranks that did not answer within timeout_s.
    """
    state = GroupState.of(group)
    if state.size == 1:
        return (_this_host(),)
    if state.hosts is None:
        state.hosts = tuple(gather(Watchdog.of(group, timeout_s), "host", _this_host(), timeout_s))
    return state.hosts


def ranks_by_host(group, *, timeout_s: float = 600.0) -> list[list[int]]:
    """The group ranks on each host, hosts in the order of their first rank. See `hosts`."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts(group, timeout_s=timeout_s)):
        members.setdefault(host, []).append(rank)
    return list(members.values())


def _this_host() -> str:
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()
