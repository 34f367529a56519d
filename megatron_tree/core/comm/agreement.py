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
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor

from ..errors import CommError
from .group import IN_PART, Call, GroupState, region, wait_limit
from .store import set_first
from .watchdog import DIFFERENT_CALLS, MEANWHILE, Report, Watchdog

if TYPE_CHECKING:
    from .ranks import Ranks


# how torch's activation checkpointing leaves a forward that it recomputes, once all that it needs is there: no failure
_EARLY_STOP = torch.utils.checkpoint._StopRecomputationError

UNSTAMPED = {"nccl"}  # backends whose messages carry nothing of the call
ASK_AFTER_S = 0.3  # of waiting, after which ranks are asked that went on without a comparison
SHOWN = 300  # characters of a value
LOGGED = 32  # calls that are compared at once where messages carry no stamp


def call_stamp(group) -> int:
    """What the messages of the group's current call carry, else its latest call's; 0 before the first one."""
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

    def __enter__(self) -> CollectiveCall:
        return self

    def __exit__(self, kind, error, trace) -> None:
        call, calls = self._call, self._state.calls
        if error is not None and not self._alone and not isinstance(error, (CommError, _EARLY_STOP)):
            if call is None and isinstance(error, Exception):
                _refuse(self._ranks.group, self._name, error)
            elif call is not None and call.runs:  # else it comes from `agree`, and all ranks know
                self._failed(error)
        if call is not None:
            if calls.current is call:
                calls.current = None
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
        how = "now"
        if check == "never" or (check == "first" and key in agreed):
            how = "if asked"
        elif check == "first" and kind in agreed:
            how = "meanwhile"
        if (digest := agreed.get(key)) is None:
            digest = digest_of(self._name, {**values, **batch})
        agreement = Agreement({**values, **batch, **(changing or {})}, digest)
        self._begin(agreement, how)
        agreed[kind] = agreed[key] = digest
        return agreement

    def start(self, after: int = 0) -> None:
        """`agree` without a comparison. after: `call_stamp` in the call that this one belongs to, as a backward does to
        its forward; ranks for which it is another one get no messages from each other."""
        if not self._alone:
            digest = zlib.crc32(after.to_bytes(8, "little"), _digest_of_name(self._name))
            self._begin(Agreement({"belongs to call": after >> 32}, digest), pending=0)

    def repeat(self, agreement: Agreement) -> None:
        """`agree` on what an earlier call has agreed on: without a comparison, unless another rank asks for one."""
        if not self._alone:
            self._begin(agreement)

    def _begin(self, agreement: Agreement, how: str = "if asked", *, pending: int = MEANWHILE) -> None:
        """how: the ranks compare "now", "meanwhile" or "if asked". pending: calls that may still be compared before."""
        check_transforms(self._name, differentiable=self._differentiable)
        limit_s, calls, checked = self._ranks.timeout_s, self._state.calls, self._ranks.config.check != "never"
        watchdog = self._state.watchdog or Watchdog.of(self._ranks.group, wait_limit(limit_s))
        call = self._call = calls.begin(self._name, agreement.digest, meets=checked)
        watchdog.settle(limit_s, at_most=pending)
        request = functools.partial(compare, watchdog, agreement.values, calls.step[0], limit_s)
        if calls.doubts:
            how, calls.doubts = "now", False
        if how == "if asked":
            call.compare = request
        elif how == "now":
            outcome = watchdog.store.run(functools.partial(request, call), wait_limit(limit_s))
            if outcome is not None:
                calls.doubt()
                raise watchdog.fail(outcome) if isinstance(outcome, Report) else outcome
        call.runs = True
        if how == "meanwhile":
            watchdog.compare_meanwhile(call, request)
        if checked and not UNSTAMPED.isdisjoint(self._state.backends.values()):
            _log_call(watchdog, call)

    def _failed(self, error: BaseException) -> None:
        watchdog, kind = self._ranks.watchdog, type(error).__name__
        if isinstance(error, ValueError) and not watchdog.is_known(error):
            watchdog.reject(self._call, f"{watchdog.me}{watchdog.where()}: {error}")
        elif not isinstance(error, ValueError):
            watchdog.fail(Report(f"{kind}: {error},{watchdog.where()}", cause="error"))


# comparisons


def digest_of(name: str, values: dict) -> int:
    """32 bits of what must be equal in a call, the same in every process."""
    return zlib.crc32(f"{name} {_texts(values)}".encode())


_digest_of_name = functools.cache(lambda name: digest_of(name, {}))


def _texts(values: dict, prefix: str = "") -> dict[str, str]:
    """Every value in words, and every field of a dataclass; a spec's fields are arguments of the function."""
    found = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            found |= _texts(fields, prefix="" if name == "spec" else f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = repr(value)
    return found


def compare(watchdog: Watchdog, values: dict, step: dict, limit_s: float, call: Call, store):
    """A request: compare a call with the other ranks'. The first rank to come writes down its values, the others
    whether theirs are the same, or how they differ.

    Returns: None where all agree; the ``ValueError`` to raise; or a `Report` of what prevents a comparison.
    """
    package = sys.modules[__package__.partition(".")[0]]
    versions = {"megatron_tree": package.__version__, "torch": torch.__version__}
    mine = {"function": call.name} | _texts(versions | values) | _texts(step, "step.")
    key, rank = watchdog.key("call", call.number), watchdog.ranks[watchdog.rank]
    store.set(f"{key}/{watchdog.rank}", "")
    first, theirs = json.loads(set_first(store, f"{key}/first", json.dumps((rank, mine))))
    if theirs == mine:
        store.add(f"{key}/count", 1)
    elif not isinstance(watchdog.news(store), Report):  # else the others have given up
        watchdog.write_rejection(store, call, _difference(first, theirs, rank, mine))
    outcome = yield from _all_come(watchdog, store, key, f"call {call.name}", limit_s, call.number)
    if outcome is None and store.add(f"{key}/read", 1) == watchdog.world:
        names = "first", "count", "read", *range(watchdog.world)
        watchdog.store.submit(lambda store: [store.delete_key(f"{key}/{name}") for name in names])
    return outcome


def _all_come(watchdog: Watchdog, store, key: str, did: str, limit_s: float, *numbers: int):
    """A request: wait until all ranks have counted themselves below key, where this one has written its number.

    did: what they do, for messages. numbers: of calls whose rejection ends the wait, too.
    Returns: None; or what prevents it, as `Watchdog.news`.
    """
    began, seen, limit_s, asks = time.monotonic(), 0, wait_limit(limit_s), True
    while store.add(f"{key}/count", 0) < watchdog.world:
        waited_s = time.monotonic() - began
        if (updates := watchdog.updates(store)) != seen:
            seen, news = updates, watchdog.news(store, *numbers)
            # unless a rank has gone on since, and failed in what comes next
            if news is not None and store.add(f"{key}/count", 0) < watchdog.world:
                return news
        if asks and waited_s > ASK_AFTER_S:
            asks = False
            watchdog.updates(store, 1)
        if waited_s > ASK_AFTER_S and (left := watchdog.who_left(store, lambda r, _: store.check([f"{key}/{r}"]))):
            return left
        if waited_s > limit_s:
            missing = [r for r in range(watchdog.world) if not store.check([f"{key}/{r}"])]
            names = [watchdog.ranks[r] for r in missing]
            return Report(f"ranks {names} did not {did} within {limit_s:g} s", missing, limit_s=limit_s)
        yield
    return None


def _difference(first: int, theirs: dict[str, str], rank: int, mine: dict[str, str]) -> str:
    names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    shown = []
    for r, values, others in sorted([(first, theirs, mine), (rank, mine, theirs)], key=lambda x: x[0]):
        pairs = {name: (values.get(name, "nothing"), others.get(name, "nothing")) for name in names}
        texts = [f"{name}={_excerpt(*pair)}" for name, pair in pairs.items()]
        shown.append(f"rank {r} has {texts[0] if 'function' in names else ', '.join(texts)}")
    way = " (shards of different lengths take layout=(n_0, n_1, ...), the length on each rank)" * ("seq_len" in names)
    return f"ranks of cp_group call this with different arguments: {'; '.join(shown)}{way}"


def _excerpt(value: str, other: str) -> str:
    """Of a long value, such as packed documents, what is around the place where it begins to differ from the other."""
    if len(value) <= SHOWN:
        return value
    at = next((i for i, (x, y) in enumerate(zip(value, other)) if x != y), min(len(value), len(other)))
    return f"...{value[max(0, at - SHOWN // 2) : at + SHOWN // 2]}..."


def _log_call(watchdog: Watchdog, call: Call) -> None:
    """For collectives that carry no stamp: compare the calls afterwards, many at once.

    Ranks that differ raise a ``ValueError`` in one of the next calls. So do those that did not wait in a call that
    another rank rejected.
    """
    calls = watchdog.calls
    calls.log.append(f"{calls.stamp & 0xFFFFFFFF:08x} {call.name}")
    if len(calls.log) == LOGGED:
        watchdog.compare_meanwhile(call, functools.partial(_compare_logs, watchdog, calls.log))
        calls.log = []


def _compare_logs(watchdog: Watchdog, log: list[str], call: Call, store):
    """A request: compare the digests and names of the calls up to this one with the first rank's."""
    yield
    rank, last, first = watchdog.ranks[watchdog.rank], call.number, call.number - LOGGED + 1
    other, *theirs = set_first(store, watchdog.key("log", last), "\n".join([str(rank), *log])).split("\n")
    store.delete_key(watchdog.key("log", last - 2 * LOGGED))
    for number, calls in enumerate(zip(theirs, log), first):
        if calls[0] != calls[1]:
            names = sorted((int(r), call.split(" ", 1)[1]) for r, call in zip((other, rank), calls))
            both = " and ".join(f"{name} on rank {r}" for r, name in names)
            return ValueError(f"{DIFFERENT_CALLS}: call {number} is {both}")
    return watchdog.news(store, *range(first, last + 1))


def gather(watchdog: Watchdog, name: str, value: str, timeout_s: float) -> list[str]:
    """Every rank's value, through the store, by group rank; once for each name. Collective.

    Raises: `CommError` naming the ranks that did not come within timeout_s.
    """
    key = watchdog.key(name)

    def request(store):
        store.set(f"{key}/{watchdog.rank}", value)
        store.add(f"{key}/count", 1)
        outcome = yield from _all_come(watchdog, store, key, f"report their {name}", timeout_s)
        return outcome or [store.get(f"{key}/{r}").decode() for r in range(watchdog.world)]

    outcome = watchdog.store.run(request, wait_limit(timeout_s))
    if isinstance(outcome, list):
        return outcome
    raise watchdog.fail(outcome)


class Refused(Exception):
    """Some rank can't take part in something that all or none must have; the message says which one, and why."""


def unanimous(ranks: Ranks, step: str, act: Callable[[], str | None]) -> list[str]:
    """What act() returned on every rank, empty for None. Collective, once for each step of a group.

    Raises: `Refused`, the same on all ranks, if act() raised it, an ``OSError`` or a ``RuntimeError`` on one of them.
    """
    try:
        said = f"+{act() or ''}"
    except (OSError, RuntimeError, Refused) as error:
        said = f"-rank {dist.get_rank()}: {error}"
    answers = gather(ranks.watchdog, step, said, ranks.timeout_s)
    for answer in answers:
        if answer.startswith("-"):
            raise Refused(answer[1:])
    return [answer[1:] for answer in answers]


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
        if not isinstance(error, (_EARLY_STOP, GeneratorExit)) and (isinstance(error, ValueError) or not region()):
            for group, calls, _ in entered:  # else the region tells all ranks of the job
                if not calls.doubts:  # else they know
                    how = f"failed{calls.place()}{region()}: {type(error).__name__}: {error}"
                    _reject_next(group, "an error", how)
        raise
    finally:
        for _, calls, before in entered:
            calls.set_step(*before)


def begin_step(group, **values) -> None:
    """From now on this rank's calls in a group are part of a step that these values, equal on all ranks, identify."""
    if (state := GroupState.of(group)).size > 1:
        state.calls.begin_step(values)


@contextlib.contextmanager
def shared_checks(name: str, group) -> Iterator[None]:
    """What this rank raises in this context, before a call of `name`, the ranks that wait for it raise, too."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, CommError) and GroupState.of(group).size > 1:
            _refuse(group, name, error)
        raise


def _refuse(group, name: str, error: Exception) -> None:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    _reject_next(group, name, f"rejected its input: {kind}{error}")


def _reject_next(group, name: str, how: str) -> None:
    """Reject the group's next call, of this name, unless the group has failed."""
    with contextlib.suppress(CommError):  # the rank's own error says more
        watchdog = Watchdog.of(group)
        if watchdog.error is None and watchdog.rejection is None:
            call = watchdog.calls.begin(name)
            watchdog.calls.current = None
            watchdog.reject(call, f"{watchdog.me} {how}")


# transforms of torch.func, through which no message goes


_DIFFERENTIATES = {TransformType.Grad, TransformType.Jvp}


def check_transforms(name: str, *tensors: Tensor | None, differentiable: bool) -> None:
    """Raise ``ValueError`` within transforms of torch.func in which this function does not run.

    tensors: what may be a batch of autograd's is_grads_batched=True. differentiable: whether there are derivatives.
    """
    found = set()
    if torch._C._are_functorch_transforms_active():
        found = {x.key() for x in get_interpreter_stack()} - (_DIFFERENTIATES if differentiable else set())
    if any(x is not None and is_legacy_batchedtensor(x) for x in tensors):
        found = {TransformType.Vmap}
    if found:
        names = ", ".join(sorted(x.name.lower() for x in found))
        raise ValueError(
            f"{name} does not run within {names} of torch.func (jacrev, jacfwd, hessian and is_grads_batched=True use "
            "vmap): call it outside; tree_attn_func and the functions of recurrent layers have grad, vjp and jvp"
        )
