"""Who has failed: ranks that wait for one another find out together, within about a second, and say the same.

Every rank has a `Watch` of each group. A rank whose wait fails, or that raises in the middle of a call, reports it on
the notice board. The others' clerks read that while they wait, and interrupt them. Then all that answer conclude which
rank it was: the first one that raised, or else those that others wait for and that report nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import CommError
from ..groups import backend, group_rank, group_size
from .board import Board, Request, set_first

GATHER_REPORTS = 0.8  # seconds in which others' reports are awaited
TAKE_OVER = 0.5  # seconds more, after which the conclusion is not left to the first rank that reported
LINGER = 0.7  # seconds that the keeper of the store stays for the others to read the conclusion
REMEMBERED = 8  # latest calls that this rank can be asked about, and may wait in
TELL_S = 5.0  # seconds for the store to take note of a refusal
NO_TAG = (1 << 31) - 1  # a tag that no message has
EVERY_GROUP = object()

_watches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> Watch


@dataclass(eq=False)
class Begun:
    """A call that this rank has gone on with. answer: compares it, should another rank ask; at most once."""

    number: int
    answer: Request | None = None


class Watch:
    """What this rank does in one group, for the other ranks to know; `Watch.of(group)` finds it."""

    def __init__(self, group, timeout_s: float):
        self.rank, self.world = group_rank(group), group_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.board = Board.here()
        self.prefix = f"megatron_tree/{group.group_name}"
        # a group that is made anew in one job, by the same name, starts anew: all its ranks count alike
        self.prefix = self.key(self.board.ask(self._count, timeout_s))
        self.num_calls = 0
        self.begun: deque[Begun] = deque(maxlen=REMEMBERED)
        self.agreed: dict = {}
        """agree.py's calls that all ranks have agreed on."""
        self.doing = "an attention call"
        self.waiting = None
        """The group, or a sub-group of it, that the main thread waits on; or `EVERY_GROUP`."""
        self.told: ValueError | None = None
        """What this rank shall raise instead of what its wait fails with."""
        self.error: Exception | None = None
        """How the group ended: it is of no use any more."""
        self._looked_at: tuple[int, int] = (0, 0)
        self._alarmed = self._has_read = False
        self._report_number = 0
        self.board.watch(self)

    @classmethod
    def of(cls, group, timeout_s: float = 60.0) -> Watch:
        """The group's watch, made at its first use, for which an answer of the store is awaited so long."""
        if (found := _watches.get(group)) is None:
            found = _watches[group] = cls(group, timeout_s)
        return found

    def key(self, *parts) -> str:
        return "/".join(map(str, (self.prefix, *parts)))

    def _count(self, store):
        yield
        return store.add(self.key("epoch", self.rank), 1)

    @contextlib.contextmanager
    def waits(self, on):
        """The main thread waits on the group or a sub-group of it: news of a failure ends that wait."""
        before, self.waiting = self.waiting, on
        try:
            yield
        finally:
            self.waiting = before

    def tick(self, store):
        """Read the news: called by the clerk while the main thread waits."""
        # one question where there is nothing new: hundreds of ranks may be waiting
        news = self.num_news(store), self.begun[-1].number if self.begun else 0
        asked = []
        if news[0] and news != self._looked_at:
            self._looked_at = news
            self._alarmed = self._alarmed or self.has_failed(store)
            self.told = self.told or self.refusal(store)
            asked = [x for x in list(self.begun) if x.answer and store.check([self.key("asks", x.number)])]
        waiting = self.waiting
        if waiting is not None and (self._alarmed or self.told is not None):
            interrupt(waiting)
        for call in asked:
            request, call.answer = call.answer, None
            error = yield from request(store)
            if isinstance(error, ValueError):
                self.told = self.told or error

    def num_news(self, store) -> int:
        """It grows with all that another rank may have to look at."""
        return store.add(self.key("news"), 0)

    def ask_others(self, store, number: int) -> None:
        """Have those answer that have gone on with call `number` without asking."""
        store.set(self.key("asks", number), "")
        store.add(self.key("news"), 1)

    def refuse(self, store, number: int, text: str):
        """This rank can't carry out call `number`: those that wait for it raise the same ``ValueError``."""
        yield
        set_first(store, self.key("refused", number), text)
        store.add(self.key("news"), 1)

    def refusal(self, store, *numbers: int) -> ValueError | None:
        """What another rank has refused: one of the calls that this rank has gone on with, or of `numbers`."""
        for number in (*[x.number for x in list(self.begun)], *numbers):
            if store.check([self.key("refused", number)]):
                return ValueError(store.get(self.key("refused", number)).decode())
        return None

    def has_failed(self, store) -> bool:
        """Whether a rank has reported that it failed."""
        return store.check([self.key("failed")])

    def report(self, store, *, what: str, suspects: list[int], cause: str | None):
        """Tell the others that this rank has failed. cause: "error" or "input" where it raised by itself."""
        yield
        if self._report_number:
            return
        if cause is not None:
            set_first(store, self.key("cause"), json.dumps({"kind": cause, "rank": self.rank, "what": what}))
        self._report_number = store.add(self.key("num_reports"), 1)
        report = {"rank": self.rank, "what": what, "suspects": suspects}
        store.set(self.key("report", self._report_number), json.dumps(report))
        store.set(self.key("failed"), "1")
        store.add(self.key("news"), 1)

    def conclude(self, store, *, what: str, suspects: list[int] = (), cause: str | None = None):
        """Report, and return what all raise: a `CommError`, or a ``ValueError``. The first that reported concludes."""
        yield from self.report(store, what=what, suspects=list(suspects), cause=cause)
        end, reports, heard = time.monotonic() + GATHER_REPORTS, {}, set()
        takes_over = end + TAKE_OVER if self._report_number > 1 else 0.0
        while not store.check([self.key("conclusion")]):
            if time.monotonic() > takes_over:
                yield from self._hear(store, reports, heard)
                silent = {r for report in reports.values() for r in report["suspects"]} - set(reports)
                complete = (len(silent) == 1 and len(reports) == self.world - 1) or len(reports) == self.world
                if complete or store.check([self.key("cause")]) or time.monotonic() > end:
                    silent = silent or set(range(self.world)) - set(reports)
                    set_first(store, self.key("conclusion"), self._conclusion(store, reports, sorted(silent)))
            yield
        said = json.loads(store.get(self.key("conclusion")))
        if not self._has_read:
            self._has_read = True
            store.add(self.key("num_read"), 1)
        yield from self._linger(store)
        return ValueError(said["text"]) if said["input"] else CommError(said["text"], tuple(said["ranks"]))

    def _hear(self, store, reports: dict[int, dict], heard: set[int]):
        for number in set(range(1, store.add(self.key("num_reports"), 0) + 1)) - heard:
            if store.check([self.key("report", number)]):
                report = json.loads(store.get(self.key("report", number)))
                heard.add(number)
                reports[report["rank"]] = report
            if number % 64 == 0:
                yield

    def _conclusion(self, store, reports: dict[int, dict], silent: list[int]) -> str:
        if store.check([self.key("cause")]):
            cause = json.loads(store.get(self.key("cause")))
            ranks, text = [self.ranks[cause["rank"]]], cause["what"]
            if cause["kind"] != "input":
                text = f"rank {ranks[0]} failed: {text}"
            return json.dumps({"input": cause["kind"] == "input", "ranks": ranks, "text": text})
        ranks = [self.ranks[r] for r in silent]
        who = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {ranks} are"
        text = f"{who} dead, stuck, or more than the time limit behind: " if ranks else "all answer, but do not meet: "
        told = [reports[rank] for rank in sorted(reports)]
        text += next((report for report in told if report["suspects"]), told[0])["what"]
        return json.dumps({"input": False, "ranks": ranks, "text": text})

    def _linger(self, store):
        """Rank 0 usually keeps the store: with its process goes what the others have not read yet."""
        end = time.monotonic() + LINGER
        while self.ranks[self.rank] == 0 and time.monotonic() < end:
            if store.add(self.key("num_read"), 0) >= self.world:
                return
            yield

    def fail(self, **report) -> Exception:
        """`conclude`, by the clerk: the error that all ranks raise."""
        try:
            self.error = self.board.ask(lambda store: self.conclude(store, **report))
        except CommError as lost:
            self.error = CommError(f"{report['what']}. Also {lost}")
        return self.error

    def lose(self, *, what: str, suspects: list[int] = (), cause: str | None = None) -> Exception:
        """`fail`; in a stage, where ranks may wait in other groups, all ranks of the job conclude together."""
        if not _stage:
            return self.fail(what=what, suspects=suspects, cause=cause)
        with contextlib.suppress(CommError):  # those that wait in this group are interrupted, too
            self.board.ask(lambda store: self.report(store, what=what, suspects=list(suspects), cause=cause))
        job = Watch.of(dist.group.WORLD)
        self.error = job.fail(what=what, suspects=[self.ranks[r] for r in suspects], cause=cause)
        return self.error


class Task:
    """One call's work, forward or backward: what this rank raises in it is told to those that wait for it."""

    def __init__(self, group, name: str):
        self._watch = None if group_size(group) == 1 else Watch.of(group)
        self._name = name

    def __enter__(self) -> None:
        if (watch := self._watch) is not None:
            self._call = watch.begun[-1] if watch.begun else None
            watch.doing = f"{self._name}, call {watch.num_calls} of its group{_stage}"

    def __exit__(self, kind, error, trace) -> None:
        watch = self._watch
        if watch is None or error is None or isinstance(error, CommError) or error in (watch.told, watch.error):
            return
        text = f"rank {dist.get_rank()} in {watch.doing}: {error}"
        with contextlib.suppress(CommError):
            if not isinstance(error, ValueError):
                watch.lose(what=f"{kind.__name__}: {error}, in {watch.doing}", cause="error")
            elif self._call in watch.begun:
                watch.begun.remove(self._call)  # this rank does not wait in it, whoever else refuses it
                watch.board.ask(lambda store: watch.refuse(store, self._call.number, text), TELL_S)


_stage = ""  # where in the run this rank is


@contextlib.contextmanager
def stage(name: str):
    """A stretch of a run in which all ranks of the job take part, other libraries' collectives included.

    An error that one rank raises in it becomes a `CommError` of all ranks that wait for it, whatever they wait in.
    """
    global _stage
    if dist.get_world_size() == 1:
        yield
        return
    watch = Watch.of(dist.group.WORLD)
    _stage, watch.waiting = f", in {name}", EVERY_GROUP
    try:
        yield
    except CommError as error:  # found out in a smaller group, whose ranks may not be those that caused it
        said = watch.fail(what=str(error), suspects=list(error.ranks))
        if isinstance(said, CommError) and said.ranks == error.ranks:
            raise
        raise said from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}, on rank {dist.get_rank()}{_stage}"
        if not _of_communication(error):
            watch.fail(what=what, cause="error")
            raise
        raise watch.fail(what=what, suspects=[r for r in watch.ranks if r != watch.rank]) from error
    finally:
        _stage, watch.waiting = "", None


def _of_communication(error: Exception) -> bool:
    """Whether an exception comes from torch.distributed; gloo raises plain ones."""
    words = ("gloo", "pair closure", "Operation timed out", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def failure(op: str, group, timeout_s: float, error: Exception, ranks=None, peer: int | None = None) -> Exception:
    """What to raise for an operation that failed. ranks: of the group, that take part; peer: the one waited for."""
    watch = Watch.of(group)
    if watch.told is not None:
        return watch.fail(what=str(watch.told), cause="input")
    ranks = range(watch.world) if ranks is None else sorted(ranks)
    at = "" if peer is None else f", in a message with rank {watch.ranks[peer]}"
    own = (
        f"{op} among ranks {[watch.ranks[r] for r in ranks]} failed on rank {dist.get_rank()} in {watch.doing} "
        f"(time limit {timeout_s:g} s){at}: {error}"
    )
    suspects = [r for r in ranks if r != watch.rank] if peer is None else [peer]
    said = watch.lose(what=own, suspects=suspects)
    if isinstance(said, ValueError) or own in str(said):
        return said
    return CommError(f"{said}. Here: {own}", said.ranks)


def interrupt(on) -> None:
    """Make this rank's waits on a group, or on all there are, fail now. They are of no use afterwards."""
    if on is not EVERY_GROUP:
        _interrupt(on)
        return
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup) and group_size(group) > 1:
            _interrupt(group)


def _interrupt(group) -> None:
    """gloo gives up a wait only at a time-out, which closes all connections of its context: time one out at once.

    It takes a peer whose connection is still there.
    """
    if backend(group) == "nccl":
        group._get_backend(torch.device("cuda")).abort()
        return
    for context in range(1 + os.environ.get("GLOO_SOCKET_IFNAME", "").count(",")):  # one for each interface
        for peer in range(group_size(group)):
            if peer != group_rank(group):
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, NO_TAG - context).wait(timedelta(milliseconds=1))
