"""The host on which every rank of a group runs."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from .health.agreement import gather

if TYPE_CHECKING:
    from .ranks import Ranks


def hosts_of(ranks: Ranks) -> tuple[str, ...]:
    """The host of every rank; ranks are on one host when these are equal. Asked once per group.

    A host is a name and a network namespace: containers with the same name but separate networks are different hosts.
    Raises `CommError` naming the ranks that did not answer in time.
    """
    if ranks.size == 1:
        return (_this_host(),)
    if ranks.state.hosts is None:
        ranks.state.hosts = tuple(gather(ranks.watchdog, "host", _this_host(), ranks.timeout_s))
    return ranks.state.hosts


def ranks_by_host(ranks: Ranks) -> list[list[int]]:
    """The ranks on each host, hosts in the order of their first rank."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(ranks.hosts):
        members.setdefault(host, []).append(rank)
    return list(members.values())


def _this_host() -> str:
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()
