"""Watchdogs: ranks that wait for one another find out together which rank failed, within about a second.

Every rank has a `Watchdog` of each group. A rank whose wait fails, or that raises in the middle of a call, reports it
in the job's store (reports.py). The watchdogs of ranks that wait look for reports ten times a second, and interrupt the
wait. Then all ranks that respond conclude which one failed: the first one that raised, or else those that others wait
for and that report nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import CommError
from ..group import GroupState, backend, group_size
from . import gloo
from .reports import Report, Reports
from .store import Request, StoreClient, set_first

REMEMBERED = 8  # latest calls that this rank can be asked about, and may wait in
MEANWHILE = 4  # calls that may go on while earlier ones are still compared
VERDICT_S = 0.5  # that a failed wait is kept back for a comparison that may explain it
REJECT_S = 5.0  # for the store to take note of a rejection
EVERY_GROUP = object()


@dataclass(eq=False)
class CallToken:
    """One call of a group, for the caller to hold: `Watchdog.begin` gives it."""

    name: str
    number: int
    compare: Request | None = None
    """Compares the call if another rank asks; None if it has been compared, or is being compared."""
    rejected: bool = False
    """Whether this rank has rejected the call itself."""

    def __str__(self) -> str:
        return f"{self.name}, call {self.number} of its group"


class Watchdog:
    """What this rank does in one group, for the other ranks to know; `Watchdog.of(group)` finds it.

    The main thread begins, joins and leaves calls, and says when it waits. `poll` runs in the store client's thread: it
    sets `rejection`, and interrupts the wait.
    """

    def __init__(self, group, timeout_s: float):
        state = GroupState.of(group)
        self.rank, self.world, self.ranks = state.rank, state.size, state.ranks
        self.store = StoreClient.here()
        self._prefix = f"megatron_tree/{group.group_name}"
        # a new group may have the name of a former one: count how many there were, the same number on every rank
        self._prefix = self.key(self.store.run(self._count, timeout_s))
        self.reports = Reports(self.key, self.rank, self.ranks)
        self.waiting_on = None
        """The group, or a sub-group of it, that the main thread waits on; or `EVERY_GROUP`."""
        self.rejection: ValueError | None = None
        """Another rank's rejection of a call that this rank is in; it is raised instead of the error of the wait."""
        self.error: Exception | None = None
        """How the group failed; it can't be used any more."""
        self._num_calls = 0
        self._joined: deque[CallToken] = deque(maxlen=REMEMBERED)
        self._comparisons: deque[Future] = deque()
        self._open: CallToken | None = None
        self._last: CallToken | None = None
        self._polled: tuple[int, int] = (0, 0)
        self._failure_seen = False
        self.store.add_watchdog(self)

    @classmethod
    def of(cls, group, timeout_s: float = 60.0) -> Watchdog:
        """The group's watchdog. Its first use asks the store, and waits for an answer for at most timeout_s."""
        state = GroupState.of(group)
        if state.watchdog is None:
            state.watchdog = cls(group, timeout_s)
        return state.watchdog

    def key(self, *parts) -> str:
        """The name of one of this group's keys in the store."""
        return "/".join(map(str, (self._prefix, *parts)))

    def _count(self, store):
        yield
        return store.add(self.key("epoch", self.rank), 1)

    def check_usable(self) -> None:
        """Raise the group's error if it has failed."""
        if self.error is not None or self.rejection is not None:
            error = self.error or self.conclude(Report(str(self.rejection), cause="input"))
            advice = "this group can't be used any more: create a new one, and end processes that hang"
            raise type(error)(f"{error} ({advice})")

    def begin(self, name: str) -> CallToken:
        """The token of the group's next call."""
        self._num_calls += 1
        self._open = self._last = CallToken(name, self._num_calls)
        return self._last

    def join(self, call: CallToken) -> None:
        """This rank runs the call: from now on it may wait in it, and can be asked about it."""
        self._joined.append(call)

    def reject(self, call: CallToken, error: str) -> None:
        """Ranks that are in this call, or come to it, raise a ``ValueError`` of this text; this one has left it."""
        call.rejected = True
        if call in self._joined:
            self._joined.remove(call)
        with contextlib.suppress(CommError):  # the rank's own error says more
            self.store.run(lambda store: self._reject(store, call.number, error), REJECT_S)

    def compare_meanwhile(self, call: CallToken, request: Request) -> None:
        """Start to compare a call that this rank goes on with. If ranks differ, the waits of all of them end."""

        def compare(store):
            outcome = yield from request(store)
            if isinstance(outcome, ValueError) and not call.rejected:
                self.rejection = self.rejection or outcome
            return outcome

        self._comparisons.append(self.store.submit(compare))

    def settle(self, timeout_s: float, *, at_most: int = 0) -> None:
        """Wait for what `compare_meanwhile` has started, but for the latest `at_most`. Raises if ranks differ."""
        while len(self._comparisons) > at_most:
            outcome = self.store.wait(self._comparisons.popleft(), timeout_s)
            if isinstance(outcome, Report):
                raise self.fail(outcome)
        self.check_usable()

    def leave(self, call: CallToken) -> None:
        """The caller is done with the call, one way or another."""
        self._open = None if self._open is call else self._open

    def where(self) -> str:
        """What this rank does, for messages: " in tree_attn_func, call 3 of its group, in step 5"."""
        call = f" in {self._open}" if self._open else f" after {self._last}" if self._last else ""
        return f"{call}{_region()}"

    @contextlib.contextmanager
    def waits(self, on) -> Iterator[None]:
        """The main thread waits on the group or a sub-group of it: another rank's failure ends that wait."""
        before, self.waiting_on = self.waiting_on, on
        try:
            yield
        finally:
            self.waiting_on = before

    @property
    def is_interrupted(self) -> bool:
        """Whether a wait of this rank in this group is to end, because another rank failed or rejected its input."""
        job = GroupState.of(dist.group.WORLD)
        watchdogs = (self, job.watchdog) if job.region else (self,)
        return any(x._failure_seen or x.rejection is not None for x in watchdogs)

    # what the store client's thread does; also used by requests of agreement.py

    def poll(self, store):
        """A request: look for what concerns this rank while its main thread waits."""
        # one operation where there is nothing new: hundreds of ranks may be waiting
        seen = self.num_updates(store), self._joined[-1].number if self._joined else 0
        asked = []
        if seen[0] and seen != self._polled:
            self._polled = seen
            self._failure_seen = self._failure_seen or self.reports.exist(store)
            self.rejection = self.rejection or self.find_rejection(store)
            asked = [x for x in list(self._joined) if x.compare and store.check([self.key("asked", x.number)])]
        waiting_on = self.waiting_on
        if waiting_on is not None and (self._failure_seen or self.rejection is not None):
            interrupt(waiting_on)
        for call in asked:
            compare, call.compare = call.compare, None
            outcome = yield from compare(store)
            if isinstance(outcome, ValueError):
                self.rejection = self.rejection or outcome

    def num_updates(self, store) -> int:
        """A number that grows with all that another rank may have to look at."""
        return store.add(self.key("updates"), 0)

    def ask_others(self, store, number: int) -> None:
        """Ask the ranks that run call `number` without a comparison to compare it."""
        store.set(self.key("asked", number), "")
        store.add(self.key("updates"), 1)

    def find_rejection(self, store, *numbers: int) -> ValueError | None:
        """Another rank's rejection of a call that this rank has joined, or of one of `numbers`."""
        for number in (*[x.number for x in list(self._joined)], *numbers):
            if store.check([self.key("rejected", number)]):
                return ValueError(store.get(self.key("rejected", number)).decode())
        return None

    def _reject(self, store, number: int, text: str):
        yield
        set_first(store, self.key("rejected", number), text)
        store.add(self.key("updates"), 1)

    # failures

    def fail(self, report: Report) -> Exception:
        """The error that all ranks raise after a failure. In a `monitored` region the ranks of the whole job conclude,
        since they may wait in different groups; otherwise those of this group."""
        if not _region():
            return self.conclude(report)
        with contextlib.suppress(CommError):  # those that wait in this group are interrupted, too
            self.store.run(lambda store: self.reports.add(store, report))
        suspects = tuple(self.ranks[r] for r in report.suspects)
        job = Watchdog.of(dist.group.WORLD)
        return self._keep(job.conclude(Report(report.what, suspects, report.cause, report.limit_s)))

    def conclude(self, report: Report) -> Exception:
        """`fail` among the ranks of this group."""
        try:
            return self._keep(self.store.run(lambda store: self.reports.conclude(store, report)))
        except CommError as lost:
            return self._keep(CommError(f"{report.what}. Also {lost}"))

    def _keep(self, error: Exception) -> Exception:
        """Note how the group failed: a copy, because the traceback of the error that is raised holds the group."""
        self.error = copy.copy(error)
        return error

    def is_known(self, error: Exception) -> bool:
        """Whether the error is the other ranks' rejection, or how the group failed: all ranks raise it."""
        return any(type(error) is type(x) and str(error) == str(x) for x in (self.rejection, self.error))

    def operation_failed(
        self, op: str, timeout_s: float, error: Exception, ranks: Iterable[int] | None = None, peers: Sequence[int] = ()
    ) -> Exception:
        """What to raise for an operation that failed. ranks: that take part; peers: those waited for."""
        if self._comparisons and not self._failure_seen:  # messages of other lengths than expected fail at once
            concurrent.futures.wait(self._comparisons, VERDICT_S)
        if self.rejection is not None:
            return self.conclude(Report(str(self.rejection), cause="input"))
        ranks = range(self.world) if ranks is None else sorted(ranks)
        waited_for = " and ".join(str(self.ranks[r]) for r in peers)
        message = f", in a message with rank {waited_for}" if peers else ""
        what = (
            f"{op} among ranks {[self.ranks[r] for r in ranks]} failed on rank "
            f"{self.ranks[self.rank]}{self.where()} (time limit {timeout_s:g} s){message}: {error}"
        )
        suspects = tuple(peers) or tuple(r for r in ranks if r != self.rank)
        timed_out = gloo.is_timeout(error) and not self._failure_seen  # and was not interrupted
        conclusion = self.fail(Report(what, suspects, limit_s=timeout_s if timed_out else None))
        if isinstance(conclusion, ValueError) or what in str(conclusion):
            return conclusion
        return CommError(f"{conclusion}. On this rank: {what}", conclusion.ranks)

    def gather(self, name: str, value: str, timeout_s: float) -> list[str]:
        """Every rank's value, through the store, by group rank; once for each name. Collective.

        Raises: `CommError` naming the ranks that did not come within timeout_s.
        """
        values, missing = self.store.run(lambda store: self._gather(store, name, value, timeout_s), timeout_s)
        if self.rejection is not None:
            raise self.conclude(Report(str(self.rejection), cause="input"))
        if not values:
            what = f"rank {self.ranks[self.rank]} waited for the {name} of the other ranks"
            if missing:
                what = f"ranks {[self.ranks[r] for r in missing]} did not report their {name} within {timeout_s:g} s"
            raise self.fail(Report(what, tuple(missing), limit_s=timeout_s if missing else None))
        return values

    def _gather(self, store, name: str, value: str, timeout_s: float):
        """A request: (the values by rank, the ranks that did not write one in time); no values unless all did."""
        keys = [self.key(name, r) for r in range(self.world)]
        store.set(keys[self.rank], value)
        end, seen = time.monotonic() + timeout_s, 0
        while not store.check(keys):
            if (updates := self.num_updates(store)) != seen:
                seen, rejection = updates, self.rejection or self.find_rejection(store)
                # unless a rank has gone on since, and rejected what comes next
                if (rejection is not None or self.reports.exist(store)) and not store.check(keys):
                    self.rejection = rejection
                    return [], []
            if time.monotonic() > end:
                return [], [r for r, key in enumerate(keys) if not store.check([key])]
            yield
        return [store.get(key).decode() for key in keys], []


def _region() -> str:
    """For messages, in a `monitored` region: ", in step 5"."""
    region = GroupState.of(dist.group.WORLD).region
    return f", in {region}" if region else ""


@contextlib.contextmanager
def monitored(region: str) -> Iterator[None]:
    """A region of a run in which all ranks of the job take part, collectives of other libraries included.

    An error that one rank raises in it becomes a `CommError` of all ranks that wait for it, whatever they wait in. The
    error names the region, for instance "step 5". A region inside another one is a part of that.
    """
    job = GroupState.of(dist.group.WORLD)
    if job.size == 1 or job.region:
        yield
        return
    watchdog = Watchdog.of(dist.group.WORLD)
    job.region, watchdog.waiting_on = region, EVERY_GROUP
    try:
        yield
    except CommError as error:  # of a smaller group, and the rank that failed may not be in it
        conclusion = watchdog.conclude(Report(str(error), error.ranks))
        if isinstance(conclusion, CommError) and conclusion.ranks == error.ranks:
            raise
        raise conclusion from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}, on rank {watchdog.rank}{_region()}"
        if not gloo.is_communication_error(error):
            watchdog.conclude(Report(what, cause="error"))
            raise
        raise watchdog.conclude(Report(what, tuple(r for r in range(job.size) if r != job.rank))) from error
    finally:
        job.region, watchdog.waiting_on = "", None


def interrupt(on) -> None:
    """Make this rank's waits on a group, or on all groups, fail now. They can't be used afterwards."""
    groups = [on]
    if on is EVERY_GROUP:
        known = list(distributed_c10d._world.pg_map)
        groups = [x for x in known if isinstance(x, dist.ProcessGroup) and group_size(x) > 1]
    for group in groups:
        if backend(group) == "nccl":
            group._get_backend(torch.device("cuda")).abort()
        else:
            gloo.interrupt(group)
