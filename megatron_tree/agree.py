"""Ranks compare what they are about to do before any payload moves: disagreement is an error, not a hang.

The comparison goes through the process group's key-value store, not through a collective: it has a time limit of its
own on every backend, can name who did not come, and leaves the group usable.
"""

from __future__ import annotations

import contextlib
import weakref
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .comm import group_rank, group_size
from .errors import CommError

_OK = b"ok"
MAX_SIGNATURES = 4096
# by group, not by its name: a group that is made anew starts anew
_rounds: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_agreed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def agree(group, signature: str, *, check: str, timeout_s: float, values: str = "") -> None:
    """Raise the same ``ValueError`` on every rank unless all ranks of the group pass the same `signature`.

    check: "first" compares a signature once and then trusts it, "always", "never" (`TreeConfig.check`). values: what
    must be equal, too, but is another in every call; it is compared when the signature is. Raises `CommError`, naming
    the missing ranks, when some don't come within timeout_s.
    """
    if group_size(group) == 1 or check == "never":
        return
    agreed = _agreed.setdefault(group, {})
    if check == "first" and signature in agreed:
        return
    verdict = _exchange(group, f"{signature}; {values}" if values else signature, timeout_s)
    if verdict != _OK:
        kind, _, text = verdict.decode().partition(":")
        raise (ValueError if kind == "differ" else CommError)(text)
    agreed[signature] = None
    if len(agreed) > MAX_SIGNATURES:  # packed documents: a new one with every batch
        del agreed[next(iter(agreed))]  # the oldest, on every rank the same


def tell_failure(group, error: Exception) -> None:
    """Tell the ranks that wait in `agree` that this rank's input was bad, so that they fail at once too."""
    if group_size(group) > 1:
        store, key = _next_round(group)
        store.set(f"{key}/{group_rank(group)}", f"!{error}")
        if group_rank(group) == 0:  # the others wait for its verdict
            store.set(f"{key}/verdict", _refused(0, str(error)))


@contextlib.contextmanager
def telling(cp_group):
    """A ``ValueError`` in here is told to the ranks that wait for this one, so that they fail at once, too."""
    try:
        yield
    except ValueError as error:
        tell_failure(cp_group, error)
        raise


def _next_round(group):
    _rounds[group] = _rounds.get(group, 0) + 1
    return distributed_c10d._get_default_store(), f"megatron_tree/{group.group_name}/{_rounds[group]}"


def _exchange(group, signature: str, timeout_s: float) -> bytes:
    store, key = _next_round(group)
    rank, world = group_rank(group), group_size(group)
    limit = timedelta(seconds=timeout_s)
    store.set(f"{key}/{rank}", signature)
    if rank == 0:
        store.set(f"{key}/verdict", _verdict(store, key, world, limit))
    try:
        store.wait([f"{key}/verdict"], limit + timedelta(seconds=1))
    except dist.DistError as error:
        raise CommError(
            f"rank 0 of the group did not come to this attention call within {timeout_s:g} s: it has failed, "
            "is stuck, or called it with a signature that it had used before"
        ) from error
    verdict = store.get(f"{key}/verdict")
    if store.add(f"{key}/read", 1) == world and verdict == _OK:
        for name in [*range(world), "verdict", "read"]:
            store.delete_key(f"{key}/{name}")
    return verdict


def _verdict(store, key: str, world: int, limit: timedelta) -> bytes | str:
    try:
        store.wait([f"{key}/{r}" for r in range(world)], limit)
    except dist.DistError:
        missing = [r for r in range(world) if not store.check([f"{key}/{r}"])]
        return (
            f"missing:ranks {missing} of the group did not come to this attention call within "
            f"{limit.total_seconds():g} s: they have failed, are stuck, or called it with a signature used before"
        )
    said = [store.get(f"{key}/{r}").decode() for r in range(world)]
    failed = {r: s[1:] for r, s in enumerate(said) if s.startswith("!")}
    if failed:
        rank, text = next(iter(failed.items()))
        return _refused(rank, text)
    other = next((r for r, s in enumerate(said) if s != said[0]), None)
    if other is None:
        return _OK
    pairs = [(x, y) for x, y in zip(said[0].split("; "), said[other].split("; ")) if x != y]
    here, there = "; ".join(x for x, _ in pairs), "; ".join(y for _, y in pairs)
    return f"differ:ranks of cp_group call this with different arguments: rank 0 has {here}, rank {other} has {there}"


def _refused(rank: int, text: str) -> str:
    return f"differ:rank {rank} of cp_group refused its input: {text}"
