"""Ranks compare what they are about to do before any payload moves: disagreement is an error, not a hang.

Each rank writes a fingerprint of its call into the job's store (store.py), once for every different call. That takes no
collective: it has a time limit of its own on every backend, can name the ranks that are missing, and leaves the group
usable. A rank that has made the same call before continues without a comparison. If another rank asks for one, and this
rank turns out to wait for it in vain, its watchdog answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
import zlib
from typing import NamedTuple

import torch

from ..call_record import Call
from ..group import wait_limit
from .reports import DIFFERENT_CALLS, Report
from .store import set_first
from .watchdog import Watchdog

ASK_AFTER_S = 0.3  # of waiting, after which ranks are asked that went on without a comparison
SHOWN = 300  # characters of a value
LOGGED = 32  # calls that are compared at once where messages carry no stamp


class Signature(NamedTuple):
    """What must be equal on all ranks in one call."""

    name: str
    values: dict
    timeout_s: float

    def __str__(self) -> str:
        package = sys.modules[__package__.partition(".")[0]]
        values = {"megatron_tree": package.__version__, "torch": torch.__version__, **self.values}
        return "\n".join([f"function={self.name}", *_lines(values)])


def digest_of(name: str, values: dict) -> int:
    """32 bits of what must be equal in a call, the same in every process."""
    return zlib.crc32("\n".join([name, *_lines(values)]).encode())


def compare(watchdog: Watchdog, signature: Signature, number: int, store):
    """A request: compare the signature of call `number` with the other ranks'.

    The first rank to come writes down its fingerprint, the others whether theirs is the same. Where one differs, both
    write down their texts.

    Returns: None where all agree; the ``ValueError`` to raise; or a `Report` of what prevents a comparison.
    """
    key, text = watchdog.key("call", number), str(signature)
    store.set(f"{key}/at/{watchdog.rank}", "")
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    firsts, first = set_first(store, f"{key}/first", f"{fingerprint} {watchdog.rank}").split()
    if firsts == fingerprint:
        if store.add(f"{key}/agreed", 1) == watchdog.world:
            set_first(store, f"{key}/verdict", "agreed")
    else:
        store.set(f"{key}/differs", "")
    began, asks, seen = time.monotonic(), True, 0
    while not store.check([f"{key}/verdict"]):
        if store.check([f"{key}/differs"]):
            _show_both(watchdog, store, key, int(first), text, same=firsts == fingerprint)
        if (updates := watchdog.num_updates(store)) != seen:
            seen = updates
            if (rejection := watchdog.find_rejection(store, number)) is not None:
                return rejection
            if watchdog.reports.exist(store):
                return Report(f"rank {watchdog.ranks[watchdog.rank]} waited for the others in {signature.name}")
        waited = time.monotonic() - began
        if asks and waited > ASK_AFTER_S:
            asks = False
            watchdog.ask_others(store, number)
        if waited > signature.timeout_s:
            return _missing(watchdog, store, key, signature)
        yield
    verdict = store.get(f"{key}/verdict").decode()
    if verdict != "agreed":
        return ValueError(verdict)
    if store.add(f"{key}/read", 1) == watchdog.world:
        watchdog.store.submit(lambda store: _clear(watchdog, store, number))
    return None


def _show_both(watchdog: Watchdog, store, key: str, first: int, text: str, *, same: bool):
    """The first rank writes down its text; a rank that differs compares it with its text and writes the verdict."""
    if first == watchdog.rank:
        store.set(f"{key}/text", text)
    elif not same and store.check([f"{key}/text"]):
        theirs, ranks = store.get(f"{key}/text").decode(), watchdog.ranks
        set_first(store, f"{key}/verdict", _difference(ranks[first], theirs, ranks[watchdog.rank], text))


def _difference(first: int, theirs: str, rank: int, text: str) -> str:
    lines, others = (dict(line.split("=", 1) for line in x.splitlines()) for x in (text, theirs))
    names = [name for name in {**others, **lines} if others.get(name) != lines.get(name)]
    if "function" in names:
        names = ["function"]
    shown = sorted([(first, _shown(names, others, lines)), (rank, _shown(names, lines, others))])
    both = "; ".join(f"rank {r} has {text}" for r, text in shown)
    return f"ranks of cp_group call this with different arguments: {both}"


def _shown(names: list[str], values: dict, others: dict) -> str:
    texts = []
    for name in names:
        value, other = values.get(name, "nothing"), others.get(name, "nothing")
        if len(value) > SHOWN:  # packed documents: where they begin to differ
            at = next((i for i, (x, y) in enumerate(zip(value, other)) if x != y), min(len(value), len(other)))
            value = f"...{value[max(0, at - SHOWN // 2) : at + SHOWN // 2]}..."
        texts.append(f"{name}={value}")
    return ", ".join(texts)


def _missing(watchdog: Watchdog, store, key: str, signature: Signature) -> Report:
    missing = tuple(r for r in range(watchdog.world) if not store.check([f"{key}/at/{r}"]))
    names, limit_s = [watchdog.ranks[r] for r in missing], signature.timeout_s
    return Report(f"ranks {names} did not call {signature.name} within {limit_s:g} s", missing, limit_s=limit_s)


def _clear(watchdog: Watchdog, store, number: int):
    for name in [*(f"at/{r}" for r in range(watchdog.world)), "first", "agreed", "verdict", "read"]:
        store.delete_key(watchdog.key("call", number, name))
    store.delete_key(watchdog.key("asked", number))
    yield


def log_call(watchdog: Watchdog, call: Call) -> None:
    """For collectives that carry no stamp: compare the calls afterwards, many at once.

    Ranks that differ raise a ``ValueError`` in one of the next calls. So do those that did not wait in a call that
    another rank rejected.
    """
    calls = watchdog.calls
    calls.log.append(f"{calls.stamp & 0xFFFFFFFF:08x} {call.name}")
    if len(calls.log) == LOGGED:
        log, calls.log = calls.log, []
        first = call.number - LOGGED + 1
        watchdog.compare_meanwhile(call, lambda store: _compare_logs(watchdog, first, log, store))


def _compare_logs(watchdog: Watchdog, first: int, log: list[str], store):
    """A request: compare the digests and names of the calls from number `first` on with those of the first rank.

    Returns: as `compare`.
    """
    yield
    rank = watchdog.ranks[watchdog.rank]
    other, *theirs = set_first(store, watchdog.key("log", first), "\n".join([str(rank), *log])).split("\n")
    if first > 2 * LOGGED:
        store.delete_key(watchdog.key("log", first - 2 * LOGGED))
    for number, calls in enumerate(zip(theirs, log), first):
        if calls[0] != calls[1]:
            names = [call.split(" ", 1)[1] for call in calls]
            both = " and ".join(f"{name} on rank {r}" for r, name in sorted(zip((int(other), rank), names)))
            return ValueError(f"{DIFFERENT_CALLS}: call {number} is {both}")
    if watchdog.num_updates(store):
        if watchdog.reports.exist(store):
            return Report(f"rank {rank} compared its latest calls")
        return watchdog.find_rejection(store, *range(first, first + LOGGED))
    return None


def gather(watchdog: Watchdog, name: str, value: str, timeout_s: float) -> list[str]:
    """Every rank's value, through the store, by group rank; once for each name. Collective.

    Raises: `CommError` naming the ranks that did not come within timeout_s.
    """
    timeout_s = wait_limit(timeout_s)
    values, missing = watchdog.store.run(lambda store: _gather(watchdog, store, name, value, timeout_s), timeout_s)
    if watchdog.rejection is not None:
        raise watchdog.conclude(Report(str(watchdog.rejection), cause="input"))
    if not values:
        what = f"rank {watchdog.ranks[watchdog.rank]} waited for the {name} of the other ranks"
        if missing:
            what = f"ranks {[watchdog.ranks[r] for r in missing]} did not report their {name} within {timeout_s:g} s"
        raise watchdog.fail(Report(what, tuple(missing), limit_s=timeout_s if missing else None))
    return values


def _gather(watchdog: Watchdog, store, name: str, value: str, timeout_s: float):
    """A request: (the values by rank, the ranks that did not write one in time); no values unless all did."""
    keys = [watchdog.key(name, r) for r in range(watchdog.world)]
    store.set(keys[watchdog.rank], value)
    end, seen = time.monotonic() + timeout_s, 0
    while not store.check(keys):
        if (updates := watchdog.num_updates(store)) != seen:
            seen, rejection = updates, watchdog.rejection or watchdog.find_rejection(store)
            # unless a rank has gone on since, and rejected what comes next
            if (rejection is not None or watchdog.reports.exist(store)) and not store.check(keys):
                watchdog.rejection = rejection
                return [], []
        if time.monotonic() > end:
            return [], [r for r, key in enumerate(keys) if not store.check([key])]
        yield
    return [store.get(key).decode() for key in keys], []


def _lines(values: dict, prefix: str = ""):
    """One line for each value, and for each field of a dataclass; those of a spec are arguments of the function."""
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            yield from _lines(fields, prefix="" if name == "spec" else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value!r}"
