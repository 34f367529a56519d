"""Calls that all ranks of a group make together: each checks its arguments, the ranks compare them, the call runs.

Each rank writes what it is about to do into the job's store (store.py), once for every different call, before any
payload moves: disagreement is an error, not a hang. That takes no collective: it has a time limit of its own on every
backend, can name the ranks that are missing, and leaves the group usable. A rank that has made the same call before
continues without a comparison. If another rank asks for one, or this rank waits for it in vain, its watchdog answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from ..errors import CommError
from .call_record import Call
from .group import IN_PART, GroupState, wait_limit
from .store import set_first
from .transforms import check_transforms
from .watchdog import DIFFERENT_CALLS, MEANWHILE, Report, Watchdog, region

if TYPE_CHECKING:
    from .ranks import Ranks

# how torch's activation checkpointing leaves a forward that it recomputes, once all that it needs is there: no failure
_EARLY_STOP = torch.utils.checkpoint._StopRecomputationError

UNSTAMPED = {"nccl"}  # backends whose messages carry nothing of the call
MAX_AGREED = 4096  # kinds of calls that a group remembers
ASK_AFTER_S = 0.3  # of waiting, after which ranks are asked that went on without a comparison
SHOWN = 300  # characters of a value
LOGGED = 32  # calls that are compared at once where messages carry no stamp


def call_stamp(group) -> int:
    """What the messages of the group's current call carry, else those of its latest; 0 before the first one."""
    return GroupState.of(group).calls.stamp


class Agreement(NamedTuple):
    """What the ranks of a call have agreed on."""

    values: dict
    digest: int
    """32 bits of the values that messages depend on."""


class CollectiveCall:
    """One call that all ranks make together: check, agree, run.

        with CollectiveCall("tree_decode", ranks) as call:
            check(q)                                  # what one rank raises here, all raise
            call.agree(q=q.shape, dtype=q.dtype)      # values that differ: the same ValueError on all ranks
            ...                                       # what one rank raises here ends the other ranks' waits

    It checks until `agree` or `start` returns, and runs from then on.

    name: of the function, for messages. differentiable: whether it has derivatives; without them it does not run within
        transforms of torch.func.
    Raises on the other ranks: ``ValueError`` for what one rank raises before `agree`, and for a ``ValueError`` that it
        raises later; `CommError` for any other error that it raises later.
    """

    def __init__(self, name: str, ranks: Ranks, *, differentiable: bool = False):
        self._name, self._ranks, self._differentiable = name, ranks, differentiable
        self._state = ranks.state
        self._alone = self._state.size == 1 or IN_PART.get()
        self._call: Call | None = None
        self._runs = False

    def __enter__(self) -> CollectiveCall:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not self._alone and error is not None and not isinstance(error, (CommError, _EARLY_STOP)):
            if self._runs:
                self._failed(error)
            elif self._call is None and isinstance(error, Exception):  # else it comes from `agree`, and all ranks know
                _refuse(self._ranks.group, self._name, error)
        if self._call is not None:
            self._state.calls.leave(self._call)
            if error is None and not torch.is_grad_enabled():  # no backward will follow, which would ask
                self._state.watchdog.settle(self._ranks.timeout_s)

    def agree(self, *, changing: dict | None = None, of_batch: dict | None = None, **values) -> Agreement:
        """Raise the same ``ValueError`` on every rank unless all ranks of the group make the same call.

        With config.check "first" a call is compared once and then trusted, with "never" not at all, otherwise always.
        Whatever the check, a call that follows an error is compared, and messages carry the call's number and a digest
        of values and of_batch, so that they can't reach another call.

        Args:
            values: hashable values that must be equal; dataclasses are compared field by field.
            of_batch: the same, but new with every batch; for calls that communicate by `Mail` only, whose tags have
                their digest. Once `values` are known, these are compared while the call runs: ranks that differ raise
                by the end of the call or, with gradients, of its backward, and can't use the group any more.
            changing: values that must be equal but differ from call to call; compared when `values` are.
        Returns: what `repeat` takes.
        Raises: ValueError with both values where two ranks differ. `CommError`, naming the missing ranks, when some
            don't come in time.
        """
        if self._alone:
            return Agreement(values, 0)
        check, agreed, batch = self._ranks.config.check, self._state.agreed, of_batch or {}
        kind = (self._name, check, *values.values())
        key = (*kind, *batch.values())
        compares = check != "never" and (check != "first" or key not in agreed)
        meanwhile = check == "first" and kind in agreed
        if (digest := agreed.get(key)) is None:
            digest = digest_of(self._name, {**values, **batch})
        agreement = Agreement({**values, **batch, **(changing or {})}, digest)
        self._begin(agreement, compares=compares, meanwhile=meanwhile)
        for x in (kind, key):
            agreed.pop(x, None)
            agreed[x] = digest  # the newest
        while len(agreed) > MAX_AGREED:  # packed documents: a new one with every batch
            del agreed[next(iter(agreed))]  # the oldest, on every rank the same
        return agreement

    def start(self, after: int = 0) -> None:
        """`agree` without a comparison. after: `call_stamp` in the call that this one belongs to, as a backward does to
        its forward; ranks for which it is another one get no messages from each other."""
        if not self._alone:
            digest = zlib.crc32(after.to_bytes(8, "little"), _digest_of_name(self._name))
            self._begin(Agreement({"belongs to call": after >> 32}, digest), settles=True)

    def repeat(self, agreement: Agreement) -> None:
        """`agree` on what an earlier call has agreed on: without a comparison, unless another rank asks for one."""
        if not self._alone:
            self._begin(agreement)

    def _begin(self, agreement: Agreement, *, compares=False, meanwhile=False, settles=False) -> None:
        check_transforms(self._name, differentiable=self._differentiable)
        limit_s, calls, checked = self._ranks.timeout_s, self._state.calls, self._ranks.config.check != "never"
        watchdog = self._state.watchdog or Watchdog.of(self._ranks.group, wait_limit(limit_s))
        call = self._call = calls.begin(self._name, agreement.digest, meets=checked)
        watchdog.settle(limit_s, at_most=0 if settles else MEANWHILE)
        request = functools.partial(compare, watchdog, call, agreement.values, calls.step[0], limit_s)
        if calls.doubts:
            compares, meanwhile, calls.doubts = True, False, False
        if compares and meanwhile:
            watchdog.compare_meanwhile(call, request)
        elif compares:
            if (outcome := watchdog.store.run(request, wait_limit(limit_s))) is not None:
                calls.doubt()
                raise watchdog.fail(outcome) if isinstance(outcome, Report) else outcome
        else:
            call.compare = request
        calls.join(call)
        if checked and not UNSTAMPED.isdisjoint(self._state.backends.values()):
            _log_call(watchdog, call)
        self._runs = True

    def _failed(self, error: BaseException) -> None:
        watchdog = self._ranks.watchdog
        if watchdog.is_known(error):
            return
        if isinstance(error, ValueError):
            watchdog.reject(self._call, f"rank {dist.get_rank()}{watchdog.where()}: {error}")
        else:
            with contextlib.suppress(CommError):
                watchdog.fail(Report(f"{type(error).__name__}: {error},{watchdog.where()}", cause="error"))


# comparisons


def digest_of(name: str, values: dict) -> int:
    """32 bits of what must be equal in a call, the same in every process."""
    return zlib.crc32("\n".join([name, *_lines(values)]).encode())


_digest_of_name = functools.cache(lambda name: digest_of(name, {}))


def compare(watchdog: Watchdog, call: Call, values: dict, step: dict, limit_s: float, store):
    """A request: compare a call with the other ranks'. The first rank to come writes down its values, the others
    whether theirs are the same, or how they differ.

    Returns: None where all agree; the ``ValueError`` to raise; or a `Report` of what prevents a comparison.
    """
    package = sys.modules[__package__.partition(".")[0]]
    versions = {"megatron_tree": package.__version__, "torch": torch.__version__}
    text = "\n".join([f"function={call.name}", *_lines(versions | values), *_lines(step, "step.")])
    key, rank = watchdog.key("call", call.number), watchdog.ranks[watchdog.rank]
    first, theirs = set_first(store, f"{key}/first", f"{rank}\n{text}").split("\n", 1)
    if theirs != text:
        watchdog.write_rejection(store, call, _difference(int(first), theirs, rank, text))
    did = f"call {call.name}"
    outcome = yield from _all_come(watchdog, store, key, did, limit_s, agrees=theirs == text, call=call)
    if outcome is None and store.add(f"{key}/read", 1) == watchdog.world:
        watchdog.store.submit(lambda store: _clear(watchdog, key, call, store))
    return outcome


def _all_come(watchdog: Watchdog, store, key: str, did: str, limit_s: float, *, value="", agrees=True, call=None):
    """A request: write down this rank's value below key, and wait until all ranks have.

    did: what they do, for messages. call: that they compare; agrees: whether this rank does.

    Returns: None; or another rank's rejection; or a `Report` of what prevents it.
    """
    store.set(f"{key}/{watchdog.rank}", value)
    if agrees:
        store.add(f"{key}/count", 1)
    began, seen, limit_s, asks = time.monotonic(), 0, wait_limit(limit_s), call is not None
    while store.add(f"{key}/count", 0) < watchdog.world:
        waited_s = time.monotonic() - began
        if (updates := watchdog.num_updates(store)) != seen:
            seen, outcome = updates, watchdog.find_rejection(store, *([call.number] if call else ()))
            if outcome is None and watchdog.has_failed(store):
                outcome = Report(f"rank {watchdog.ranks[watchdog.rank]} waited for the others to {did}")
            # unless a rank has gone on since, and failed in what comes next
            if outcome is not None and store.add(f"{key}/count", 0) < watchdog.world:
                return outcome
        if asks and waited_s > ASK_AFTER_S:
            asks = False
            watchdog.write_question(store, call)
        if waited_s > limit_s:
            missing = [r for r in range(watchdog.world) if not store.check([f"{key}/{r}"])]
            names = [watchdog.ranks[r] for r in missing]
            return Report(f"ranks {names} did not {did} within {limit_s:g} s", missing, limit_s=limit_s)
        yield
    return None


def _clear(watchdog: Watchdog, key: str, call: Call, store):
    for name in ("first", "count", "read", *range(watchdog.world)):
        store.delete_key(f"{key}/{name}")
    store.delete_key(watchdog.key("asked", call.number))
    yield


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


def _lines(values: dict, prefix: str = ""):
    """One line for each value, and for each field of a dataclass; those of a spec are arguments of the function."""
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            yield from _lines(fields, prefix="" if name == "spec" else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value!r}"


def _log_call(watchdog: Watchdog, call: Call) -> None:
    """For collectives that carry no stamp: compare the calls afterwards, many at once.

    Ranks that differ raise a ``ValueError`` in one of the next calls. So do those that did not wait in a call that
    another rank rejected.
    """
    calls = watchdog.calls
    calls.log.append(f"{calls.stamp & 0xFFFFFFFF:08x} {call.name}")
    if len(calls.log) == LOGGED:
        watchdog.compare_meanwhile(call, functools.partial(_compare_logs, watchdog, call.number, calls.log))
        calls.log = []


def _compare_logs(watchdog: Watchdog, last: int, log: list[str], store):
    """A request: compare the digests and names of the calls up to number `last` with those of the first rank.

    Returns: as `compare`.
    """
    yield
    rank, numbers = watchdog.ranks[watchdog.rank], range(last - LOGGED + 1, last + 1)
    other, *theirs = set_first(store, watchdog.key("log", last), "\n".join([str(rank), *log])).split("\n")
    if last > 2 * LOGGED:
        store.delete_key(watchdog.key("log", last - 2 * LOGGED))
    for number, calls in zip(numbers, zip(theirs, log)):
        if calls[0] != calls[1]:
            names = [call.split(" ", 1)[1] for call in calls]
            both = " and ".join(f"{name} on rank {r}" for r, name in sorted(zip((int(other), rank), names)))
            return ValueError(f"{DIFFERENT_CALLS}: call {number} is {both}")
    if watchdog.has_failed(store):
        return Report(f"rank {rank} compared its latest calls")
    return watchdog.find_rejection(store, *numbers)


def gather(watchdog: Watchdog, name: str, value: str, timeout_s: float) -> list[str]:
    """Every rank's value, through the store, by group rank; once for each name. Collective.

    Raises: `CommError` naming the ranks that did not come within timeout_s.
    """
    key = watchdog.key(name)

    def request(store):
        outcome = yield from _all_come(watchdog, store, key, f"report their {name}", timeout_s, value=value)
        return outcome or [store.get(f"{key}/{r}").decode() for r in range(watchdog.world)]

    outcome = watchdog.store.run(request, wait_limit(timeout_s))
    if isinstance(outcome, list):
        return outcome
    raise watchdog.fail(outcome)


# steps, and errors ahead of a call


@contextlib.contextmanager
def part_of_call() -> Iterator[None]:
    """Calls in this context are part of a call that this rank is in: they have no number and are not compared. For
    calls that are recorded now and carried out later, when other ranks may not record them."""
    token = IN_PART.set(True)
    try:
        yield
    finally:
        IN_PART.reset(token)


@contextlib.contextmanager
def in_step(*groups, **values) -> Iterator[None]:
    """What all ranks of these groups run in step: one pass of a model, one step of training.

    If a rank leaves this context by an error, the others hear of it: where they wait for that rank in one of the
    groups, or in their next call, they raise a ``ValueError`` that says who failed, after which call, and how. Where
    all ranks leave it in the same place, nobody waits, and the groups stay usable. Calls of different steps don't get
    each other's messages, however alike they are.

    groups: None, or one rank alone, does nothing. values: what identifies the step, equal on all ranks.
    """
    entered = []
    try:
        for group in dict.fromkeys(groups):
            if (state := GroupState.of(group)).size > 1:
                entered.append((group, state.calls, state.calls.step))
                state.calls.begin_step(values)
        yield
    except BaseException as error:
        if not isinstance(error, (_EARLY_STOP, GeneratorExit)):
            for group, *_ in entered:
                _leave_by(group, error)
        raise
    finally:
        for _, calls, before in entered:
            calls.set_step(*before)


def begin_step(group, **values) -> None:
    """From now on this rank's calls in a group are part of a step that these values, equal on all ranks, identify."""
    if (state := GroupState.of(group)).size > 1:
        state.calls.begin_step(values)


def _leave_by(group, error: BaseException) -> None:
    """Tell the ranks of a group that this one won't come to the next call, unless they know."""
    if region() and not isinstance(error, ValueError):  # the region tells all ranks of the job
        return
    with contextlib.suppress(CommError):  # the rank's own error says more
        watchdog = Watchdog.of(group)
        if not (watchdog.calls.doubts or watchdog.error or watchdog.rejection):
            what = f"{type(error).__name__}: {error}"
            _reject(group, "an error", f"rank {dist.get_rank()} failed{watchdog.where()}: {what}")


@contextlib.contextmanager
def shared_checks(name: str, group) -> Iterator[None]:
    """What this rank raises in this context, before a call of `name`, the ranks that wait for it raise, too."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        if GroupState.of(group).size > 1:
            _refuse(group, name, error)
        raise


def _refuse(group, name: str, error: Exception) -> None:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    _reject(group, name, f"rank {dist.get_rank()} rejected its input: {kind}{error}")


def _reject(group, name: str, text: str) -> None:
    """Reject the group's next call, of this name."""
    with contextlib.suppress(CommError):  # the rank's own error says more
        watchdog = Watchdog.of(group)
        call = watchdog.calls.begin(name)
        watchdog.calls.leave(call)
        watchdog.reject(call, text)
