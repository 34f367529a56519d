"""Ranks compare what they are about to do before any payload moves: disagreement is an error, not a hang.

Each rank puts a fingerprint of its call on the notice board (comm/board.py), once for every different call. That takes
no collective: it has a time limit of its own on every backend, can name who did not come, and leaves the group usable.
A rank that has made a call like this before goes on without asking. Where another one asks, and this rank turns out to
wait for it in vain, its clerk answers for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
import time

import torch
import torch.distributed as dist

from ...errors import CommError
from .. import group_size
from .board import set_first
from .watch import TELL_S, Begun, Watch

MAX_CALLS = 4096
PATIENCE = 0.3  # seconds after which a rank that is waited for is asked, if it went on without asking
SHOWN = 300  # characters of a value


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: what must be equal on all ranks."""

    name: str
    values: dict
    also: dict
    """The same, but another in every call: compared when `values` are."""
    timeout_s: float

    def text(self) -> str:
        package = sys.modules[__package__.partition(".")[0]]
        values = {"megatron_tree": package.__version__, "torch": torch.__version__, **self.values, **self.also}
        return "\n".join([f"function={self.name}", *_lines(values)])


def agree(group, name: str, *, check: str, timeout_s: float, also: dict | None = None, **values) -> None:
    """Raise the same ``ValueError`` on every rank unless all ranks of the group make the same call.

    Args:
        name: of the function. values: what must be equal, hashable; dataclasses are compared field by field.
        check: "first" compares a call once and then trusts it, "never" does not; otherwise it is always compared.
        also: values that must be equal, too, but are others in every call; compared when `values` are.
    Raises: ValueError with both values where two ranks differ. `CommError`, naming the missing ranks, when some don't
        come within timeout_s.
    """
    if group_size(group) == 1:
        return
    watch = Watch.of(group, timeout_s)
    if watch.error is not None or watch.told is not None:
        raise _ended(watch)
    watch.num_calls += 1
    watch.doing, number = name, watch.num_calls
    key, agreed = (name, *values.values()), watch.agreed
    request = functools.partial(_compare, watch, Call(name, values, also or {}, timeout_s), number)
    if check == "never" or (check == "first" and key in agreed):
        watch.begun.append(Begun(number, request))
        return
    error = watch.board.ask(request, timeout_s)
    if error is not None:
        raise error if not isinstance(error, _Absent) else watch.lose(what=str(error), suspects=error.ranks)
    watch.begun.append(Begun(number))
    agreed[key] = None
    if len(agreed) > MAX_CALLS:  # packed documents: a new one with every batch
        del agreed[next(iter(agreed))]  # the oldest, on every rank the same


def _ended(watch: Watch) -> Exception:
    error = watch.error or watch.fail(what=str(watch.told), cause="input")
    advice = "this group can't be used any more: make a new one, and end the ranks that are stuck"
    return type(error)(f"{error} ({advice})")


def tell_failure(group, error: Exception) -> None:
    """Tell the ranks that wait for this one, or will, that its input was bad, so that they fail at once, too."""
    if group_size(group) > 1:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        with contextlib.suppress(CommError):  # the rank's own error says more
            watch = Watch.of(group)
            watch.num_calls += 1
            number, text = watch.num_calls, f"rank {dist.get_rank()} refused its input: {kind}{error}"
            watch.board.ask(lambda store: watch.refuse(store, number, text), TELL_S)


@contextlib.contextmanager
def telling(cp_group):
    """What this rank raises in here, ahead of a call, is a ``ValueError`` of the ranks that wait for it."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        tell_failure(cp_group, error)
        raise


class _Absent(CommError):
    def __init__(self, text: str, ranks: list[int]):
        super().__init__(text)
        self.ranks = ranks


def _compare(watch: Watch, call: Call, number: int, store):
    """A clerk's request: compare call `number` with the other ranks'. Returns the error to raise, or None.

    The first rank that comes says what the call is, all others whether theirs is the same.
    """
    key, text = watch.key("call", number), call.text()
    store.set(f"{key}/at/{watch.rank}", "")
    own = f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()} {watch.rank}"
    fingerprint, first = set_first(store, f"{key}/first", own).split()
    if fingerprint == own.split()[0]:
        if store.add(f"{key}/agreed", 1) == watch.world:
            set_first(store, f"{key}/verdict", "agreed")
    else:
        store.set(f"{key}/differs", "")
    began, asks, seen = time.monotonic(), True, 0
    while not store.check([f"{key}/verdict"]):
        if store.check([f"{key}/differs"]):
            _show_both(watch, store, key, int(first), text, same=fingerprint == own.split()[0])
        if (news := watch.num_news(store)) != seen:
            seen = news
            if (refusal := watch.refusal(store, number)) is not None:
                return refusal
            if watch.has_failed(store):
                return _Absent(f"{call.name}: this rank waits for all others to come", [])
        waited = time.monotonic() - began
        if asks and waited > PATIENCE:
            asks = False
            watch.ask_others(store, number)
        if waited > call.timeout_s:
            return _absent(watch, store, key, call)
        yield
    verdict = store.get(f"{key}/verdict").decode()
    if verdict != "agreed":
        return ValueError(verdict)
    if store.add(f"{key}/read", 1) == watch.world:
        watch.board.start(lambda store: _clear(watch, store, number))
    return None


def _show_both(watch: Watch, store, key: str, first: int, text: str, *, same: bool):
    """The first rank shows its call, one that differs compares it with its own: that is the verdict."""
    if first == watch.rank:
        store.set(f"{key}/text", text)
    elif not same and store.check([f"{key}/text"]):
        theirs = store.get(f"{key}/text").decode()
        set_first(store, f"{key}/verdict", _difference(watch.ranks[first], theirs, watch.ranks[watch.rank], text))


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


def _absent(watch: Watch, store, key: str, call: Call) -> _Absent:
    missing = [r for r in range(watch.world) if not store.check([f"{key}/at/{r}"])]
    names = [watch.ranks[r] for r in missing]
    return _Absent(f"ranks {names} did not come to {call.name} within {call.timeout_s:g} s", missing)


def _clear(watch: Watch, store, number: int):
    for name in [*(f"at/{r}" for r in range(watch.world)), "first", "agreed", "verdict", "read"]:
        store.delete_key(watch.key("call", number, name))
    store.delete_key(watch.key("asks", number))
    yield


def _lines(values: dict, prefix: str = ""):
    """One line for each value, and for each field of a dataclass; those of a spec are arguments of the function."""
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            yield from _lines(fields, prefix="" if name == "spec" else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value!r}"
