"""Who has failed: ranks that wait for one another find out together, within about a second, and say the same.

Every rank has a `Watch` of each group. A rank whose wait fails, or that raises in the middle of a call, reports it on
the notice board. The others' clerks read that while they wait, and interrupt them. Then all that answer conclude which
rank it was: the first one that raised, or else those that others wait for and that report nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import CommError
from .board import Board, Request, set_first
from .groups import backend, group_rank, group_size

GATHER_REPORTS = 0.8  # seconds in which others' reports are awaited
LINGER = 0.7  # seconds that the keeper of the store stays for the others to read the conclusion
REMEMBERED = 8  # latest calls that this rank can be asked about
NO_TAG = (1 << 31) - 1  # a tag that no message has
EVERY_GROUP = object()

_watches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> Watch


class Watch:
    """What this rank does in one group, for the other ranks to know; `Watch.of(group)` finds it."""

    def __init__(self, group):
        self.rank, self.world = group_rank(group), group_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.board = Board.here()
        self.prefix = f"megatron_tree/{group.group_name}"
        # a group that is made anew in one job, by the same name, starts anew: all its ranks count alike
        self.prefix = self.key(self.board.ask(self._count, 60.0))
        self.lock = threading.Lock()
        self.num_calls = 0
        self.in_call: int | None = None
        """Number of the call that is being carried out."""
        self.agreed: dict = {}
        """agree.py's calls that all ranks have agreed on."""
        self.doing = "an attention call"
        self.waiting = None
        """The group, or a sub-group of it, that the main thread waits on; or `EVERY_GROUP`."""
        self.told: ValueError | None = None
        """What this rank shall raise instead of what its wait fails with."""
        self.error: Exception | None = None
        """How the group ended: it is of no use any more."""
        self._unasked: dict[int, Request] = {}
        self._asked: set[int] = set()
        self._alarmed = self._reported = False
        self.board.watch(self)

    @classmethod
    def of(cls, group) -> Watch:
        if (found := _watches.get(group)) is None:
            found = _watches[group] = cls(group)
        return found

    def key(self, *parts) -> str:
        return "/".join(map(str, (self.prefix, *parts)))

    def _count(self, store):
        yield
        return store.add(self.key("epoch", self.rank), 1)

    def tick(self, store):
        """Read the news: called by the clerk while the main thread waits."""
        self._alarmed = self._alarmed or store.check([self.key("failed")])
        number = self.in_call
        if number is not None and self.told is None and store.check([self.key("refused", number)]):
            self.told = ValueError(store.get(self.key("refused", number)).decode())
        waiting = self.waiting
        if waiting is not None and (self._alarmed or self.told is not None):
            interrupt(waiting)
        for number in list(self._unasked):
            if number not in self._asked and store.check([self.key("asks", number)]):
                yield from self._take_question(store, number)

    def _take_question(self, store, number: int):
        with self.lock:
            self._asked.add(number)
            request = self._unasked.get(number)
        error = None if request is None else (yield from request(store))
        if isinstance(error, ValueError):
            self.told = self.told or error

    def remember(self, number: int, request: Request) -> bool:
        """This rank begins a call without asking the others, False where one of them asks already.

        request: what answers, should one of them ask later; it returns a ``ValueError`` if they differ.
        """
        with self.lock:
            self._unasked[number] = request
            if len(self._unasked) > REMEMBERED:
                del self._unasked[next(iter(self._unasked))]
            return number not in self._asked

    def refuse(self, store, number: int, text: str):
        """This rank can't carry out call `number`: those that wait for it raise the same ``ValueError``."""
        yield
        set_first(store, self.key("refused", number), text)

    def report(self, store, *, what: str, suspects: list[int], cause: str | None):
        """Tell the others that this rank has failed. cause: "error" or "input" where it raised by itself."""
        yield
        if not self._reported:
            self._reported = True
            store.set(self.key("failed", self.rank), json.dumps({"what": what, "suspects": suspects}))
            if cause is not None:
                set_first(store, self.key("cause"), json.dumps({"kind": cause, "rank": self.rank, "what": what}))
            store.add(self.key("num_failed"), 1)
            store.set(self.key("failed"), "1")

    def conclude(self, store, *, what: str, suspects: list[int] = (), cause: str | None = None):
        """Report, hear the others, and return what all of them raise: a `CommError`, or a ``ValueError``."""
        yield from self.report(store, what=what, suspects=list(suspects), cause=cause)
        end, reports = time.monotonic() + GATHER_REPORTS, {}
        while not store.check([self.key("conclusion")]):
            if store.add(self.key("num_failed"), 0) > len(reports):
                self._read_reports(store, reports)
            silent = {r for report in reports.values() for r in report["suspects"]} - set(reports)
            complete = (len(silent) == 1 and len(reports) == self.world - 1) or len(reports) == self.world
            if complete or store.check([self.key("cause")]) or time.monotonic() > end:
                silent = silent or set(range(self.world)) - set(reports)
                set_first(store, self.key("conclusion"), self._conclusion(store, reports, sorted(silent)))
            yield
        said = json.loads(store.get(self.key("conclusion")))
        store.add(self.key("num_read"), 1)
        yield from self._linger(store)
        return ValueError(said["text"]) if said["input"] else CommError(said["text"], tuple(said["ranks"]))

    def _read_reports(self, store, reports: dict[int, dict]) -> None:
        for rank in range(self.world):
            if rank not in reports and store.check([self.key("failed", rank)]):
                reports[rank] = json.loads(store.get(self.key("failed", rank)))

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
            if store.add(self.key("num_read"), 0) == self.world:
                return
            yield

    def fail(self, **report) -> Exception:
        """`conclude`, by the clerk: the error that all ranks raise."""
        try:
            self.error = self.board.ask(lambda store: self.conclude(store, **report))
        except CommError as lost:
            self.error = CommError(f"{report['what']}. Also {lost}")
        return self.error


class Task:
    """One call's work, forward or backward: what this rank raises in it is told to those that wait for it."""

    def __init__(self, group, name: str):
        self._watch = None if group_size(group) == 1 else Watch.of(group)
        self._name = name

    def __enter__(self) -> None:
        if self._watch is not None:
            self._watch.in_call = self._watch.num_calls
            self._watch.doing = f"{self._name}, call {self._watch.num_calls} of its group{_stage}"

    def __exit__(self, kind, error, trace) -> None:
        watch = self._watch
        if watch is None:
            return
        watch.in_call = None
        if error is None or isinstance(error, CommError) or error in (watch.told, watch.error):
            return
        text = f"rank {dist.get_rank()} in {watch.doing}: {error}"
        with contextlib.suppress(CommError):
            if isinstance(error, ValueError):
                watch.board.ask(lambda store: watch.refuse(store, watch.num_calls, text))
            else:
                watch.fail(what=f"{kind.__name__}: {error}, in {watch.doing}", cause="error")


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
    except CommError as error:  # found out in a smaller group
        watch.fail(what=str(error), suspects=list(error.ranks))
        raise
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
    said = watch.fail(what=own, suspects=suspects)
    if isinstance(said, ValueError) or own in str(said):
        return said
    return CommError(f"{said}. Here: {own}")


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
