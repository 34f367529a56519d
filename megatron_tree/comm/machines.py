"""On which host every rank of a group runs."""

from __future__ import annotations

import os
import socket
import time
import weakref

from .groups import group_size
from .health.watch import Watch

_hosts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> host of every rank


def hosts(group, *, timeout_s: float = 600.0) -> tuple[str, ...]:
    """The host of every rank of the group; ranks are on one host when these are equal. Asked once per group.

    A host is a name and a network namespace: containers of one name with networks of their own are different hosts.
    Raises `CommError` naming the ranks that did not answer within timeout_s.
    """
    if group_size(group) == 1:
        return (_this_host(),)
    if group not in _hosts:
        watch = Watch.of(group, timeout_s)
        found, missing = watch.board.ask(lambda store: _exchange(watch, store, timeout_s), timeout_s)
        if watch.told is not None:
            raise watch.fail(what=str(watch.told), cause="input")
        if not found:
            names = [watch.ranks[r] for r in missing]
            what = f"ranks {names} did not say within {timeout_s:g} s on which host they run"
            raise watch.lose(what=what, suspects=missing)
        _hosts[group] = tuple(found)
    return _hosts[group]


def _exchange(watch: Watch, store, timeout_s: float):
    """Hosts by rank; none where not all have said theirs, and the ranks that did not in time."""
    keys = [watch.key("host", r) for r in range(watch.world)]
    store.set(keys[watch.rank], _this_host())
    end, seen = time.monotonic() + timeout_s, 0
    while not store.check(keys):
        if (news := watch.num_news(store)) != seen:
            seen, watch.told = news, watch.told or watch.refusal(store)
            if watch.told is not None or watch.has_failed(store):
                return [], []
        if time.monotonic() > end:
            return [], [r for r, key in enumerate(keys) if not store.check([key])]
        yield
    return [store.get(key).decode() for key in keys], []


def _this_host() -> str:
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()
