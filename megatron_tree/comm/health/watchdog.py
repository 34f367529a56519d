"""Watchdogs: ranks that wait for one another find out together which rank failed, within about a second.

Every rank has a `Watchdog` for each group. A rank whose wait fails, or that raises in the middle of a call, reports it
in the job's store (reports.py). The watchdogs of waiting ranks look for reports ten times a second, less often among
more than a hundred ranks (store.py), and interrupt the wait. Then all ranks that respond conclude which one failed: the
first one that raised, or else those that others wait for and that report nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import CommError
from ..call_record import Call
from ..group import GroupState, group_size, wait_limit
from . import gloo
from .reports import Report, Reports
from .store import POLL_S, Request, StoreClient, set_first

MEANWHILE = 4  # calls that may go on while earlier ones are still compared
ASK_S = 1.0  # of waiting in a call that was not compared, after which it is
VERDICT_S = 0.5  # that a failed wait is kept back for a comparison that may explain it
REJECT_S = 5.0  # for the store to take note of a rejection
EVERY_GROUP = object()


class Watchdog:
    """What this rank waits for in one group, and the errors that end its waits; `Watchdog.of(group)` finds it.

    The main thread says when it waits. `poll` runs in the store client's thread: it sets `rejection`, and interrupts
    the wait.
    """

    def __init__(self, group, timeout_s: float):
        state = GroupState.of(group)
        self.rank, self.world, self.ranks, self.calls = state.rank, state.size, state.ranks, state.calls
        self.store = StoreClient.here()
        self._prefix = f"megatron_tree/{group.group_name}"
        # a new group may have the name of a freed one: number them, the same way on every rank
        self._prefix = self.key(self.store.run(self._count, timeout_s))
        self.reports = Reports(self.key, self.rank, self.ranks, later_s=self.store.poll_s - POLL_S)
        self.waiting_on = None
        """The group, or a sub-group of it, that the main thread waits on; or `EVERY_GROUP`."""
        self.waiting_for: Sequence[dist.Work] = ()
        """The operations among them, if the main thread waits in torch.distributed."""
        self.waiting_since = math.inf
        """When it began to wait for other ranks, see `time.monotonic`; inf: it does not."""
        self.rejection: ValueError | None = None
        """Another rank's rejection of a call that this rank is in; it is raised instead of the error of the wait."""
        self.error: Exception | None = None
        """How the group failed; it can't be used any more."""
        self._comparisons: deque[Future] = deque()
        self._polled: tuple = ()
        self._wait: tuple[int, float, float] = (0, 0.0, 0.0)
        self._longest_wait_s = 0.0
        self._failure_seen = False
        self._is_overdue = False
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

    def reject(self, call: Call, error: str) -> None:
        """Ranks that are in this call, or come to it, raise a ``ValueError`` of this text; this one has left it."""
        self.calls.reject(call)
        with contextlib.suppress(CommError):  # the rank's own error says more
            self.store.run(lambda store: self._reject(store, call, error), REJECT_S)

    def compare_meanwhile(self, call: Call, request: Request) -> None:
        """Start to compare a call while this rank runs it. If ranks differ, the waits of all of them end."""

        def compare(store):
            outcome = yield from request(store)
            if isinstance(outcome, ValueError) and not call.rejected:
                self.rejection = self.rejection or outcome
            return outcome

        self._comparisons.append(self.store.submit(compare))

    def settle(self, timeout_s: float, *, at_most: int = 0) -> None:
        """Wait for what `compare_meanwhile` has started, but for the latest `at_most`. Raises if ranks differ."""
        while len(self._comparisons) > at_most:
            outcome = self.store.wait(self._comparisons.popleft(), wait_limit(timeout_s))
            if isinstance(outcome, Report):
                raise self.fail(outcome)
        if self.error is not None or self.rejection is not None:
            self.check_usable()

    def where(self) -> str:
        """What this rank does, for messages: " in tree_attn_func, call 3 of its group, in step 5"."""
        return f"{self.calls.place()}{region()}"

    @contextlib.contextmanager
    def waits(self, on, works: Sequence[dist.Work] = ()) -> Iterator[None]:
        """While the main thread waits on the group or a sub-group of it, another rank's failure ends that wait."""
        before = self.waiting_on, self.waiting_for, self.waiting_since
        self.waiting_for, self.waiting_since, self.waiting_on = works, time.monotonic(), on
        try:
            yield
        finally:
            self.waiting_on, self.waiting_for, self.waiting_since = before

    @property
    def is_interrupted(self) -> bool:
        """Whether a wait of this rank in this group is to end: another rank failed or rejected its input, or it takes
        longer than the region allows."""
        job = GroupState.of(dist.group.WORLD)
        watchdogs = (self, job.watchdog) if job.region else (self,)
        return self._is_overdue or any(x._failure_seen or x.rejection is not None for x in watchdogs)

    # runs in the store client's thread, and in requests of agreement.py

    def poll(self, store):
        """A request: look for failures, rejections and questions while the main thread waits."""
        if time.monotonic() - self.waiting_since > wait_limit():
            self._is_overdue = True
            self.interrupt(self.waiting_on)
        # one operation if nothing is new: hundreds of ranks may be waiting
        joined = self.calls.joined()
        seen = self.num_updates(store), joined[-1].number if joined else 0, self.calls.made
        asked = []
        if seen[0] and seen != self._polled:
            self._polled = seen
            self._failure_seen = self._failure_seen or self.reports.exist(store)
            self.rejection = self.rejection or self.find_rejection(store)
            asked = [x for x in joined if x.compare and store.check([self.key("asked", x.number)])]
        if self._waits_long() and (call := self.calls.current) in joined and call.compare and call not in asked:
            asked.append(call)
        waiting_on = self.waiting_on
        if waiting_on is not None and (self._failure_seen or self.rejection is not None):
            self.interrupt(waiting_on)
        for call in asked:
            compare, call.compare = call.compare, None
            outcome = yield from compare(store)
            if isinstance(outcome, ValueError):
                self.rejection = self.rejection or outcome

    def interrupt(self, on) -> None:
        """Make this rank's waits on a group, or on all groups, fail now. They can't be used afterwards."""
        groups = [on]
        if on is EVERY_GROUP:
            known = list(distributed_c10d._world.pg_map)
            groups = [x for x in known if isinstance(x, dist.ProcessGroup) and group_size(x) > 1]
        for group in groups:
            backends = GroupState.of(group).backends
            if backends.get("cuda") == "nccl":
                group._get_backend(torch.device("cuda")).abort()
            if backends.get("cpu") == "gloo":
                gloo.interrupt(group)
        for work in [work for watchdog in self.store.watchdogs for work in watchdog.waiting_for]:
            gloo.abort(work)

    def _waits_long(self) -> bool:
        """Whether the main thread waits in its call for longer than usual, perhaps for ranks that make another one."""
        call, now = self.calls.current, time.monotonic()
        if call is None:
            return False
        number, began, latest = self._wait
        if number != call.number:
            self._longest_wait_s = max(self._longest_wait_s, latest - began)
            number, began = call.number, now
        self._wait = number, began, now
        return now - began > max(ASK_S, 2 * self._longest_wait_s)

    def num_updates(self, store) -> int:
        """A number that grows with every report, rejection and question."""
        return store.add(self.key("updates"), 0)

    def ask_others(self, store, number: int) -> None:
        """Ask the ranks that run call `number` without a comparison to compare it."""
        store.set(self.key("asked", number), "")
        store.add(self.key("updates"), 1)

    def find_rejection(self, store, *numbers: int) -> ValueError | None:
        """Another rank's rejection of a call that this rank has joined, or of one of `numbers`; or of the call to come,
        where this rank is in no call, but in a collective that the other one has not come to."""
        for number in (*[x.number for x in self.calls.joined()], *numbers):
            if store.check([self.key("rejected", number)]):
                return ValueError(self._rejected(store, number)[1])
        latest, made = self.calls.outside() or (0, 0)
        if made and store.check([self.key("rejected", latest + 1)]):
            after, text = self._rejected(store, latest + 1)
            return ValueError(text) if made > int(after) else None
        return None

    def _rejected(self, store, number: int) -> list[str]:
        """How many collectives after the call before it the rejecting rank has made, and its error."""
        return store.get(self.key("rejected", number)).decode().split(" ", 1)

    def _reject(self, store, call: Call, text: str):
        yield
        set_first(store, self.key("rejected", call.number), f"{call.after} {text}")
        store.add(self.key("updates"), 1)

    # failures

    def fail(self, report: Report) -> Exception:
        """The error that all ranks raise after a failure. In a `monitored` region the ranks of the whole job conclude,
        since they may wait in different groups; otherwise those of this group."""
        if not region():
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

    def note_failure(self, error: Exception) -> None:
        """Note how the group failed: a copy, because the traceback of the error that is raised holds the group."""
        self.error = copy.copy(error)

    def _keep(self, error: Exception) -> Exception:
        self.note_failure(error)
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
        if self._is_overdue:
            timeout_s = wait_limit()
        ranks = range(self.world) if ranks is None else sorted(ranks)
        waited_for = " and ".join(str(self.ranks[r]) for r in peers)
        message = f", in a message with rank {waited_for}" if peers else ""
        what = (
            f"{op} among ranks {[self.ranks[r] for r in ranks]} failed on rank "
            f"{self.ranks[self.rank]}{self.where()} (time limit {timeout_s:g} s){message}: {error}"
        )
        suspects = tuple(peers) or tuple(r for r in ranks if r != self.rank)
        # and was not interrupted by another rank's failure
        timed_out = (self._is_overdue or gloo.is_timeout(error)) and not self._failure_seen
        conclusion = self.fail(Report(what, suspects, limit_s=timeout_s if timed_out else None))
        if isinstance(conclusion, ValueError) or what in str(conclusion):
            return conclusion
        return CommError(f"{conclusion}. On this rank: {what}", conclusion.ranks)

    def calls_differ(self, what: str) -> Exception:
        """What to raise where this rank has met another one in another call. what: this rank does, for the message."""
        with contextlib.suppress(CommError):
            self.rejection = self.rejection or self.store.run(self._rejection)
        if self.rejection is not None:
            return self.conclude(Report(str(self.rejection), cause="input"))
        return self.fail(Report(f"rank {self.ranks[self.rank]} runs {what}{self.where()}", cause="calls"))

    def _rejection(self, store):
        yield
        return self.find_rejection(store)


def region() -> str:
    """For messages, in a `monitored` region: ", in step 5"."""
    region = GroupState.of(dist.group.WORLD).region
    return f", in {region}" if region else ""
