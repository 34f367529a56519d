"""Watchdogs: ranks that wait for one another find out together which rank failed, within about a second.

Every rank has a `Watchdog` for each group. A rank whose wait fails, or that raises in the middle of a call, reports it
in the job's store. The watchdogs of waiting ranks look for reports ten times a second, less often among more than a
hundred ranks (store.py), and interrupt the wait. Then all ranks that respond conclude which one failed: the first one
that raised, or else those that others wait for and that report nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import ctypes
import functools
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import CommError, name_ranks
from ..log import logger
from .group import Call, GroupState, region, wait_limit
from .store import POLL_S, Farewell, StoreClient, set_first

MEANWHILE = 4  # calls that may go on while earlier ones are still compared
ASK_S = 1.0  # of waiting in a call that was not compared, after which it is
VERDICT_S = 0.5  # that a failed wait is kept back for a comparison that may explain it
REJECT_S = 5.0  # for the store to take note of a rejection
GATHER_S = 0.8  # for the other ranks' reports
TAKE_OVER_S = 0.5  # more, after which the conclusion is not left to the first rank that reported
LINGER_S = 0.7  # that the process which hosts the store stays for the others to read the conclusion
LATE = 0.9  # of its time limit
DIFFERENT_CALLS = "the ranks of cp_group make different calls, or in another order"
EVERY_GROUP = object()


class Report(NamedTuple):
    """What one rank saw of a failure."""

    what: str
    suspects: Sequence[int] = ()
    """The ranks that it waited for."""
    cause: str = ""
    """"error" or "input" where this rank raised by itself, "calls" where it met ranks in other calls, "left" where its
    suspects take part no more; else empty."""
    limit_s: float | None = None
    """The time limit, where it ran out."""
    rank: int = 0
    """That saw it."""


class Wait(NamedTuple):
    """A wait of the main thread for other ranks."""

    on: object
    """The group, or a sub-group of it; or `EVERY_GROUP`."""
    works: Sequence[dist.Work] = ()
    """The operations, if it waits in torch.distributed."""
    since: float = math.inf
    """When it began, see `time.monotonic`; inf: in a `monitored` region, in which it may wait outside this package."""


class Queued(NamedTuple):
    """The collective that this rank has queued last on a device, whose host does not wait for it."""

    what: str
    limit_s: float
    since: float
    """See `time.monotonic`."""


class Watchdog:
    """What this rank waits for in one group, and the errors that end its waits; `Watchdog.of(group)` finds it.

    The main thread says when it waits. `poll` runs in the store client's thread, and interrupts the wait.
    """

    def __init__(self, group, timeout_s: float):
        state = GroupState.of(group)
        self.rank, self.world, self.ranks, self.calls = state.rank, state.size, state.ranks, state.calls
        self.me, self.store = f"rank {self.ranks[self.rank]}", StoreClient.here()
        self._prefix = f"megatron_tree/{group.group_name}"
        # a new group may have the name of a freed one: number them, the same way on every rank
        epoch = self.key("epoch", self.rank)
        self._prefix = self.key(self.store.run(lambda store: store.add(epoch, 1), timeout_s))
        self.store.records[self._prefix] = self.calls
        self.wait: Wait | None = None
        self.queued: Queued | None = None
        self._said: Queued | None = None
        self.is_interrupted = False
        """Whether a wait in this group is to end: another rank failed or rejected its input, or it takes too long."""
        self.rejection: ValueError | None = None
        """Another rank's rejection of a call that this rank is in; it is raised instead of the error of the wait."""
        self.leavers: Report | None = None
        """Ranks that take part no more, while this one waits for them."""
        self.error: Exception | None = None
        """How the group failed; it can't be used any more."""
        self._asked = 0  # ranks, whether they take part no more
        self._comparisons: deque[Future] = deque()
        self._polled: tuple = ()
        self._is_overdue = False
        self._report_number = 0  # of this rank's own report, from 1

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

    def where(self) -> str:
        """What this rank does, for messages: " in tree_attn_func, call 3 of its group, in step 5"."""
        return f"{self.calls.place()}{region()}"

    @contextlib.contextmanager
    def waits(self, on, works: Sequence[dist.Work] = ()) -> Iterator[None]:
        """While the main thread waits on the group or a sub-group of it, another rank's failure ends that wait."""
        before, self.wait = self.wait, Wait(on, works, time.monotonic())
        try:
            yield
        finally:
            self.wait = before

    def note_queued(self, op: str, limit_s: float) -> None:
        """A collective is queued on a device: its time limit is torch's to keep."""
        self.queued = Queued(f"{op}{self.where()}", limit_s, time.monotonic())

    def _say_what_is_late(self) -> None:
        """In a `monitored` region the host may wait for the device outside of this package, and torch's watchdog may
        end the process: shortly before, the log says in what."""
        queued = max((x.queued for x in self.store.watchdogs if x.queued), key=lambda x: x.since, default=None)
        if queued is not None and queued is not self._said and time.monotonic() - queued.since > LATE * queued.limit_s:
            self._said = queued
            logger.warning(
                "%s has queued nothing for %.3g s since %s: if another rank is lost or late, torch ends this process "
                "when that has taken %g s",
                self.me,
                time.monotonic() - queued.since,
                queued.what,
                queued.limit_s,
            )

    def interrupt(self, on) -> None:
        """Make this rank's waits on a group, or on all groups, fail now. They can't be used afterwards."""
        everywhere = on is EVERY_GROUP
        for watchdog in self.store.watchdogs if everywhere else [self]:
            watchdog.is_interrupted = True
        for group in list(distributed_c10d._world.pg_map) if everywhere else [on]:
            if isinstance(group, dist.ProcessGroup) and (state := GroupState.of(group)).size > 1:
                if state.backends.get("cuda") == "nccl":
                    group._get_backend(torch.device("cuda")).abort()
                if state.backends.get("cpu") == "gloo":
                    interrupt(group)
        for wait in [x.wait for x in self.store.watchdogs]:
            for work in wait.works if wait else ():
                abort(work)

    # what other ranks say, in the store client's thread

    def poll(self, store):
        """A request: look for failures, rejections and questions while the main thread waits."""
        if (wait := self.wait) is None:
            return
        if wait.on is EVERY_GROUP:
            self._say_what_is_late()
        waited_s, running, current = time.monotonic() - wait.since, self.calls.running(), self.calls.current
        self._is_overdue = self._is_overdue or waited_s > wait_limit()
        asked = [current] if waited_s > ASK_S and current in running else []  # perhaps others make another call
        # one operation if nothing is new: hundreds of ranks may be waiting
        seen, news = (self.updates(store), running[-1].number if running else 0, self.calls.made), None
        if seen[0] and seen != self._polled:
            self._polled, news = seen, self.news(store)
            if isinstance(news, ValueError):
                self.rejection = news
            asked += [x for x in running if x.compare and store.check([self.key("call", x.number, "first")])]
        if self.leavers is None and waited_s > ASK_S and current is not None:
            self.leavers = self.who_left(store, lambda _, called: called >= current.number)
        if self._is_overdue or self.is_interrupted or any(x is not None for x in (news, self.rejection, self.leavers)):
            self.interrupt(wait.on)
        for call in asked:
            if (compare := call.compare) is not None:
                call.compare = None
                yield from self._judge(call, compare, store)

    def who_left(self, store, came: Callable[[int, int], bool]) -> Report | None:
        """The ranks that take part no more and have not come to what this one waits in. Asks about one of them, and
        the next time about the next one: hundreds of ranks may be waiting.

        came(rank, number of its latest call): whether a rank did come, and has left since.
        """

        def how(rank: int) -> str:
            left = self._farewell(store, rank)
            return "" if left is None or came(rank, left.calls.get(self._prefix, 0)) else left.how

        self._asked += 1
        if not how((self.rank + 1 + self._asked % (self.world - 1)) % self.world):
            return None
        left = {r: how(r) for r in range(self.world) if r != self.rank}
        ranks = [r for r in left if left[r]]
        what = _ended([self.ranks[r] for r in ranks], left[ranks[0]])
        return Report(f"{what} while {self.me} waited{self.where()}", ranks, cause="left")

    def _farewell(self, store, rank: int) -> Farewell | None:
        """Of a rank of this group; not that of an earlier default group with the same store."""
        left = Farewell.of(store, self.ranks[rank])
        return left if left is not None and (left.is_last or left.calls.keys() & self.store.records.keys()) else None

    def updates(self, store, new: int = 0) -> int:
        """A number that grows with every report, rejection and question. new: 1 for one of this rank's."""
        return store.add(self.key("updates"), new)

    def news(self, store, *numbers: int) -> ValueError | Report | None:
        """Why this rank waits in vain, if it does: a `Report` where another one has failed, or its rejection of a call
        that this rank runs, or of one of `numbers`; or of the call to come, where this rank is in no call, but in a
        collective that the other one has not come to."""
        if self.rejection is not None:
            return self.rejection
        calls = self.calls
        latest, made, numbers = calls.latest, calls.made, {*numbers, *(x.number for x in calls.running())}
        to_come = latest.number + 1 if made and calls.current is None and calls.latest is latest else 0
        for number in sorted({*numbers, to_come}):
            if store.check([key := self.key("rejected", number)]):
                after, text = store.get(key).decode().split(" ", 1)
                if number in numbers or made > int(after):
                    return ValueError(text)
        return Report(f"{self.me} waited{self.where()}") if store.check([self.key("reports")]) else None

    def write_rejection(self, store, call: Call, text: str) -> None:
        set_first(store, self.key("rejected", call.number), f"{call.after} {text}")
        self.updates(store, 1)

    def reject(self, call: Call, text: str) -> None:
        """Ranks that are in this call, or come to it, raise a ``ValueError`` of this text; this one has left it."""
        call.runs = False
        self.calls.doubt()
        with contextlib.suppress(CommError):  # the rank's own error says more
            self.store.run(lambda store: self.write_rejection(store, call, text), REJECT_S)

    def compare_meanwhile(self, call: Call, compare: Callable) -> None:
        """Start the request compare(call, store) while this rank runs the call. If ranks differ, the waits of all of
        them end."""
        self._comparisons.append(self.store.submit(lambda store: self._judge(call, compare, store)))

    def _judge(self, call: Call, compare: Callable, store):
        outcome = yield from compare(call, store)
        if isinstance(outcome, ValueError) and call.runs:
            self.rejection = self.rejection or outcome
        return outcome

    def settle(self, timeout_s: float, *, at_most: int = 0) -> None:
        """Wait for what `compare_meanwhile` has started, but for the latest `at_most`. Raises if ranks differ."""
        while len(self._comparisons) > at_most:
            outcome = self.store.wait(self._comparisons.popleft(), wait_limit(timeout_s))
            if isinstance(outcome, Report):
                raise self.fail(outcome)
        if self.error is not None or self.rejection is not None:
            raise self.unusable()

    def unusable(self) -> Exception:
        """The error of a group that has failed, where it is used again."""
        error = self.error or self.fail(self.rejection)
        advice = "this group can't be used any more: create a new one, and end processes that hang"
        return type(error)(f"{error} ({advice})")

    # failures

    def operation_failed(
        self, op: str, timeout_s: float, error: Exception, ranks: Iterable[int] | None = None, peers: Sequence[int] = ()
    ) -> Exception:
        """What to raise for an operation that failed. ranks: that take part; peers: those waited for."""
        if self._comparisons and not self.is_interrupted:  # messages of other lengths than expected fail at once
            concurrent.futures.wait(self._comparisons, VERDICT_S)
        if (known := self.rejection or self.leavers) is not None:
            return self.fail(known)
        ranks, limit_s = range(self.world) if ranks is None else sorted(ranks), wait_limit(timeout_s)
        waited_for = " and ".join(str(self.ranks[r]) for r in peers)
        what = (
            f"{op} among ranks {[self.ranks[r] for r in ranks]} failed on {self.me}{self.where()} (time limit "
            f"{limit_s:g} s){f', in a message with rank {waited_for}' if peers else ''}: {_reason(error)}"
        )
        timed_out = self._is_overdue or (is_timeout(error) and not self.is_interrupted)
        suspects = tuple(peers) or tuple(r for r in ranks if r != self.rank)
        conclusion = self.fail(Report(what, suspects, limit_s=limit_s if timed_out else None))
        if isinstance(conclusion, ValueError) or what in str(conclusion):
            return conclusion
        return CommError(f"{conclusion}. On this rank: {what}", conclusion.ranks)

    def calls_differ(self, what: str) -> Exception:
        """What to raise where this rank has met another one in another call. what: this rank does, for the message."""
        with contextlib.suppress(CommError):
            news = self.store.run(self.news)
            self.rejection = news if isinstance(news, ValueError) else None
        return self.fail(self.rejection or Report(f"{self.me} runs {what}{self.where()}", cause="calls"))

    def is_known(self, error: BaseException) -> bool:
        """Whether the error is the other ranks' rejection, or how the group failed: all ranks raise it."""
        return any(type(error) is type(x) and str(error) == str(x) for x in (self.rejection, self.error))

    def fail(self, why: Report | ValueError) -> Exception:
        """The error that all ranks of this group raise after a failure, or after another rank's rejection.

        After a failure in a `monitored` region the ranks of the whole job conclude, since they may wait in different
        groups.
        """
        concluding = self
        if isinstance(why, ValueError):
            why = Report(str(why), cause="input")
        elif region():
            concluding = Watchdog.of(dist.group.WORLD)
            why = why._replace(suspects=[self.ranks[r] for r in why.suspects])
        try:
            error = self.store.run(lambda store: concluding._conclude(store, why))
        except CommError as lost:
            error = CommError(f"{why.what}. Also {lost}")
        # a copy: the traceback of the error that is raised holds the group
        self.error = concluding.error = copy.copy(error)
        return error

    def _conclude(self, store, report: Report):
        """A request: report, and return the error that all ranks raise. A rank that raised by itself says so, else the
        first one that reported concludes."""
        conclusion, is_input = self.key("conclusion"), report.cause == "input"
        if not self._report_number:
            if report.cause in ("input", "error", "left"):
                who = [self.ranks[r] for r in report.suspects or [self.rank]]
                text = f"{self.me} failed: {report.what}" if report.cause == "error" else report.what
                set_first(store, conclusion, json.dumps((is_input, who, text)))
            self._report_number = store.add(self.key("reports"), 1)
            store.set(self.key("report", self._report_number), json.dumps(report._replace(rank=self.rank)))
            self.updates(store, 1)
        later_s = self.store.poll_s - POLL_S  # by which the ranks of a large job see a report later
        end, reports = time.monotonic() + GATHER_S + later_s, {}
        take_over = end + TAKE_OVER_S if self._report_number > 1 else 0.0
        while not store.check([conclusion]):
            if time.monotonic() > take_over:
                for number in set(range(1, store.add(self.key("reports"), 0) + 1)) - set(reports):
                    if store.check([self.key("report", number)]):
                        reports[number] = Report(*json.loads(store.get(self.key("report", number))))
                    if number % 64 == 0:
                        yield
                heard = {x.rank for x in reports.values()}
                silent = {r for x in reports.values() for r in x.suspects} - heard
                if len(heard) == self.world or len(silent) == 1 == self.world - len(heard) or time.monotonic() > end:
                    failed = sorted(silent or set(range(self.world)) - heard)
                    left = [x.how for x in (self._farewell(store, r) for r in failed) if x is not None]
                    how = left[0] if left and len(left) == len(failed) else ""
                    failed = [self.ranks[r] for r in failed]
                    found = _conclusion(sorted(reports.values(), key=lambda x: x.rank), failed, how)
                    set_first(store, conclusion, json.dumps(found))
            yield
        is_input, ranks, text = json.loads(store.get(conclusion))
        store.set(self.key("read", self.rank), "")
        end, all_read = time.monotonic() + LINGER_S + later_s, [self.key("read", r) for r in range(self.world)]
        # the process of rank 0 usually hosts the store: when it ends, the others can't read the conclusion
        while self.ranks[self.rank] == 0 and time.monotonic() < end and not store.check(all_read):
            yield
        return ValueError(text) if is_input else CommError(text, tuple(ranks))


def _reason(error: Exception) -> str:
    """Of gloo's errors, without the place in its sources and without its advice."""
    return re.sub(r"^\[\S+\.cc:\d+\] |\. This is typically caused by .*", "", str(error), flags=re.DOTALL)


def _ended(ranks: Sequence[int], how: str) -> str:
    return f"{name_ranks(ranks)} ended {'its program' if len(ranks) == 1 else 'their programs'} ({how})"


def _conclusion(reports: list[Report], silent: list[int], how: str) -> tuple[bool, list[int], str]:
    """(whether it is the input's fault, the ranks that failed, how) where no rank says that it has failed by itself.

    how: the silent ranks have left, if they have.
    """
    if differing := [x.what for x in reports if x.cause == "calls"]:
        return True, [], f"{DIFFERENT_CALLS}: {'; '.join(differing)}"
    waited = [x for x in reports if x.suspects]
    what = (waited or reports)[0].what
    if not silent:
        return False, [], f"all ranks respond, but they wait for one another in different operations: {what}"
    who = name_ranks(silent)
    # concluded in a smaller group, and now once more in the whole job
    if what.startswith((f"{who} did not respond", f"{who} ended")):
        return False, silent, what
    if how:
        return False, silent, f"{_ended(silent, how)}: {what}"
    limit_s = min((x.limit_s for x in waited if x.limit_s is not None), default=None)
    limit = "" if limit_s is None else f" within {limit_s:g} s"
    return False, silent, f"{who} did not respond{limit}: {what}"


@contextlib.contextmanager
def monitored(name: str, *, wait_limit_s: float = math.inf) -> Iterator[None]:
    """A region of a run in which all ranks of the job take part, collectives of other libraries included.

    An error that one rank raises in it becomes a `CommError` of all ranks that wait for it, whatever they wait in. The
    error has its name, for instance "step 5". No group can be used any more then. A region inside another one is a part
    of that.

    wait_limit_s: seconds for which a rank may wait for others in one collective of this package, where that is less
    than the collective's own time limit. What a rank computes itself does not count. With NCCL the host does not wait.
    """
    job = GroupState.of(dist.group.WORLD)
    if job.size == 1 or job.region:
        yield
        return
    watchdog = Watchdog.of(dist.group.WORLD)
    job.region, job.wait_limit_s, watchdog.wait = name, wait_limit_s, Wait(EVERY_GROUP)
    try:
        yield
    except Exception as error:
        conclusion = watchdog.fail(_report_of(error, watchdog))
        for other in watchdog.store.watchdogs:  # whose ranks may go on to other calls now
            other.error = other.error or watchdog.error
        waited = isinstance(error, CommError) or is_communication_error(error)
        if not waited or (isinstance(error, CommError) and error.ranks == getattr(conclusion, "ranks", None)):
            raise
        raise conclusion from error
    finally:
        job.region, job.wait_limit_s, watchdog.wait = "", math.inf, None


def _report_of(error: Exception, job: Watchdog) -> Report:
    """The report of a rank that leaves a region by this error."""
    what = f"{type(error).__name__}: {error}, on {job.me}{region()}"
    if isinstance(error, CommError):  # of a smaller group, and the rank that failed may not be in it
        return Report(str(error), error.ranks)
    if is_communication_error(error):
        return Report(what, [r for r in range(job.world) if r != job.rank])
    if any(x.is_known(error) for x in job.store.watchdogs):  # another rank's, which its text names
        return Report(str(error), cause="input")
    return Report(what, cause="error")


def waited_s() -> float:
    """Seconds for which this rank has been waiting for others; 0 if it does not wait. From any thread."""
    if not dist.is_initialized() or (store := GroupState.of(dist.group.WORLD).store) is None:
        return 0.0
    waits = [x.wait for x in store.watchdogs]
    return max(0.0, time.monotonic() - min([store.waiting_since, *(x.since for x in waits if x is not None)]))


# giving up a wait of gloo, and telling errors of communication from others


UNUSED_TAG = (1 << 31) - 1  # no message has it
_WORDS = ("gloo", "pair closure", "Operation timed out", "Connection closed by peer", "Connection reset by peer")
_TRAP = "unspecified launch failure"  # CUDA's words for it: a barrier in symmetric memory gives up by a trap


def interrupt(group) -> None:
    """Make this rank's waits on a gloo group fail now. The group can't be used afterwards.

    gloo gives up a wait only when one times out, which closes all connections of its context. So a receive that no rank
    sends to is made to time out at once. It takes a peer whose connection is still open.
    """
    state = GroupState.of(group)
    for context in range(1 + os.environ.get("GLOO_SOCKET_IFNAME", "").count(",")):  # one for each interface
        for peer in set(range(state.size)) - {state.rank}:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, UNUSED_TAG - context).wait(timedelta(milliseconds=1))


def abort(work: dist.Work) -> None:
    """End a wait for a message that is half sent or half received; ``work.wait()`` returns False then.

    gloo tells nobody of such a message when its connection closes (`Pair::signalException` knows those alone that have
    not begun), so that its wait would go on until the time limit. torch's C++ has a way to end it, and Python's `Work`
    hasn't: it is called here for what certainly is such a message, as the virtual table tells.
    """
    if type(work) is not dist.Work or not (aborts := _aborts()):
        return
    cpp = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value  # pybind11: after the object's head
    table = ctypes.c_void_p.from_address(cpp).value if cpp else None
    if table in aborts:
        aborts[table](cpp)


@functools.cache
def _aborts() -> dict[int, Callable[[int], None]]:
    """`abort` of messages by the address of their class's virtual table; empty where torch is built otherwise."""
    found, pointer = {}, ctypes.sizeof(ctypes.c_void_p)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        for name in ("8SendWork", "8RecvWork"):
            table = ctypes.c_char.in_dll(library, f"_ZTVN4c10d16ProcessGroupGloo{name}E")
            function = library[f"_ZN4c10d16ProcessGroupGloo{name}5abortEv"]
            function.argtypes, function.restype = (ctypes.c_void_p,), None
            found[ctypes.addressof(table) + 2 * pointer] = function  # after the offset to the top and the type
    return found


def is_communication_error(error: Exception) -> bool:
    """Whether an exception comes from torch.distributed; gloo and CUDA raise plain ``RuntimeError``s."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in (*_WORDS, _TRAP))
    )


def is_timeout(error: Exception) -> bool:
    """Whether the text of an error of torch.distributed or gloo says that a time limit ran out."""
    return re.search(r"timed? ?out|was not made within", str(error), re.IGNORECASE) is not None
