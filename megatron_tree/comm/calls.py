"""Collective calls: every rank checks its arguments, the ranks compare them, then the call runs."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
import torch.utils.checkpoint

from ..errors import CommError
from .call_record import Call, Step
from .group import IN_PART, GroupState, wait_limit
from .health.agreement import Signature, compare, digest_of, log_call
from .health.reports import Report
from .health.watchdog import MEANWHILE, Watchdog, region
from .transforms import check_transforms

if TYPE_CHECKING:
    from .ranks import Ranks

# how torch's activation checkpointing leaves a forward that it recomputes, once all that it needs is there: no failure
_EARLY_STOP = torch.utils.checkpoint._StopRecomputationError

_digest_of_name = functools.cache(lambda name: digest_of(name, {}))

UNSTAMPED = {"nccl"}  # backends whose messages carry nothing of the call
MAX_AGREED = 4096  # signatures that a group remembers


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
            self._begin(Agreement({"belongs to call": after >> 32}, digest), compares=False, settles=True)

    def repeat(self, agreement: Agreement) -> None:
        """`agree` on what an earlier call has agreed on: without a comparison, unless another rank asks for one."""
        if not self._alone:
            self._begin(agreement, compares=False)

    def _begin(self, agreement: Agreement, *, compares: bool, meanwhile: bool = False, settles: bool = False) -> None:
        check_transforms(self._name, differentiable=self._differentiable)
        limit_s, calls, checked = self._ranks.timeout_s, self._state.calls, self._ranks.config.check != "never"
        watchdog = self._state.watchdog or Watchdog.of(self._ranks.group, wait_limit(limit_s))
        call = self._call = calls.begin(self._name, agreement.digest, meets=checked)
        watchdog.settle(limit_s, at_most=0 if settles else MEANWHILE)
        request = functools.partial(_compare, watchdog, self._name, agreement.values, calls.step, limit_s, call.number)
        if calls.doubts:
            compares, meanwhile, calls.doubts = True, False, False
        if compares and meanwhile:
            watchdog.compare_meanwhile(call, request)
        elif compares:
            outcome = watchdog.store.run(request, wait_limit(limit_s))
            if outcome is not None:
                calls.doubt()
                raise watchdog.fail(outcome) if isinstance(outcome, Report) else outcome
        else:
            call.compare = request
        calls.join(call)
        if not UNSTAMPED.isdisjoint(self._state.backends.values()) and checked:
            log_call(watchdog, call)
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


def _compare(watchdog: Watchdog, name: str, values: dict, step: Step | None, limit_s: float, number: int, store):
    of_step = {} if step is None else {f"step.{name}": value for name, value in step.values.items()}
    return compare(watchdog, Signature(name, values | of_step, wait_limit(limit_s)), number, store)


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
                begin_step(group, **values)
        yield
    except BaseException as error:
        if not isinstance(error, (_EARLY_STOP, GeneratorExit)):
            for group, *_ in entered:
                _leave_by(group, error)
        raise
    finally:
        for _, calls, before in entered:
            calls.begin_step(before)


def begin_step(group, **values) -> None:
    """From now on this rank's calls in a group are part of a step that these values, equal on all ranks, identify."""
    state = GroupState.of(group)
    if state.size > 1:
        latest = state.calls.latest
        state.calls.begin_step(Step.after(latest.number if latest else 0, values))


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
