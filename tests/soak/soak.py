"""Work in rounds on an emulated cluster; ranks are killed, stopped and paused, files damaged. `checks` judges it."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import time
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_tree.tools.emulate import Cluster
from megatron_tree.tools.emulate.forked import Rank, Ranks

from ..support.leftovers import leftovers, listening_ports

KINDS = ("kill", "damage", "stop", "pause")  # in turn; damage: kill a rank, then damage the newest of the files
LOOK_S, SAMPLE_S = 0.25, 2.0
WARM_S = 20.0  # of work, before the counts of a process are taken
SLACK_S = 5.0  # beyond the time limit, for survivors to end
RECORDING_S = 5.0  # beyond that, to record how late they are
QUIET_S = 120.0  # without a result the ranks count as stuck
KEPT_LINES, KEPT_TEXT = 400, 1500


Survivor = namedtuple("Survivor", "rank seconds status said")
"""How a rank ended after another one was lost, in how many seconds (None: the soak had to end it), with which error."""
Fault = namedtuple("Fault", "at_s incarnation kind rank survivors")
"""What the soak did to a rank. A paused one has no survivors: nobody may end."""
Sample = namedtuple("Sample", "at_s incarnation rank memory fds threads ports")
"""Counts of one warm rank. memory: bytes that no file backs, heaps and stacks. ports: that listen in its node."""
Incarnation = namedtuple("Incarnation", "number work round began_s ended_s expected resumed last failed left")
"""One run of all ranks.

expected: steps or answers of the round on disk before it. resumed: the step after which it says that it went on. last:
steps or answers at its end. failed: a failure that the soak did not cause, or "". left: processes and ports afterwards.
"""
Result = namedtuple("Result", "work round incarnation key value")
"""A loss or an answer. Round 0 is undisturbed: what it gives is the truth."""


class Soak:
    """Incarnations one after another, and their record."""

    def __init__(self, cluster: Cluster, works: list, *, limit_s: float, seed: int):
        self.works, self.limit_s, self.began = {work.name: work for work in works}, limit_s, time.monotonic()
        self.results: list[Result] = []
        self.incarnations: list[Incarnation] = []
        self.faults: list[Fault] = []
        self.samples: list[Sample] = []
        self.left: list[str] = []
        self._cluster, self._random = cluster, random.Random(seed)
        self._rounds = dict.fromkeys(self.works, 0)
        self._every_s: float | None = None  # seconds of work between two faults; None: no faults
        self._worked = self._due = 0.0

    def run(self, home: Path, seconds: float, every_s: float, report: Callable[[Incarnation], None]) -> None:
        """Run incarnations, until the first failure that the soak did not cause."""
        for work in self._turns(home, seconds, every_s):
            report(self._incarnate(work, home))
            if self.incarnations[-1].failed:
                return

    def _turns(self, home: Path, seconds: float, every_s: float) -> Iterator:
        """A round of each work without faults; rounds with faults for so many seconds; the rest of what was begun."""
        yield from self.works.values()
        self._every_s, self._due, end = every_s, every_s, time.monotonic() + seconds
        yield from itertools.takewhile(lambda _: time.monotonic() < end, itertools.cycle(self.works.values()))
        self._every_s = None
        yield from (work for work in self.works.values() if self._folder(home, work).exists())

    def _folder(self, home: Path, work) -> Path:
        """Of the work's open round; it exists once the round has begun."""
        return home / f"{work.name}-{self._rounds[work.name]}"

    def _now(self) -> float:
        return time.monotonic() - self.began

    def _incarnate(self, work, home: Path) -> Incarnation:
        """Run the ranks until the end of the round, the loss of one, or a failure."""
        folder, number, began_s = self._folder(home, work), len(self.incarnations), self._now()
        folder.mkdir(exist_ok=True)
        expected = work.saved(folder)
        said: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))
        argv = work.argv(folder, number)
        with self._cluster.start_script(argv, on_line=lambda rank, line: said[rank].append(line)) as ranks:
            failed, kind = self._watch(ranks, work, folder, said)
        results = work.results(folder, number)
        last, over = work.done(results), not failed and kind in (None, "pause")
        if kind == "damage" and not work.damage(folder):
            self.faults[-1] = self.faults[-1]._replace(kind="kill")
        if over or not work.once:  # answers are read at the end of a round, losses after each incarnation
            self.results += [Result(work.name, self._rounds[work.name], number, *x) for x in results]
        found = Incarnation(
            number, work.name, self._rounds[work.name], began_s, self._now(), expected,
            work.resumed_after(folder, number), max(last, expected), failed, leftovers(self._cluster),
        )  # fmt: skip
        self.incarnations.append(found)
        if over:
            shutil.rmtree(folder)
            self._rounds[work.name] += 1
        return found

    def _watch(self, ranks: Ranks, work, folder: Path, said: dict) -> tuple[str, str | None]:
        """Until the ranks have ended or one is lost: (what failed, or "", the last fault's kind)."""
        number, first, kind = len(self.incarnations), None, None
        before = done = work.done(work.results(folder, number))
        progressed = sampled = looked = self._now()
        while ranks.unfinished():
            ranks.watch(LOOK_S)
            now, done = self._now(), work.done(work.results(folder, number))
            if done != before:
                before, progressed, first = done, now, first or now
            if ranks.failed():
                self._wait_for(ranks, ranks.unfinished())
                return "; ".join(f"rank {r.number}: {_error(r, said)}" for r in ranks.failed()), None
            if now - progressed > QUIET_S:
                return f"no result within {QUIET_S:g} s: {_error(ranks.ranks[0], said)}", None
            self._worked, looked = self._worked + (now - looked) * (first is not None), now
            running = len(ranks.unfinished()) == len(ranks.ranks) and done < work.total
            if running and first is not None and now - max(sampled + SAMPLE_S, first + WARM_S) > 0:
                sampled = now
                self._sample(ranks)
            if running and first is not None and self._every_s is not None and self._worked >= self._due:
                kind = self._disturb(ranks, said)
                self._due = self._worked + self._every_s * self._random.uniform(0.5, 1.5)
                if kind != "pause":
                    return "", kind
                progressed = looked = self._now()
        return "", kind

    def _disturb(self, ranks: Ranks, said: dict) -> str:
        """Do the next kind of fault to a random rank; returns the kind."""
        kind, at_s, start = KINDS[len(self.faults) % len(KINDS)], self._now(), time.monotonic()
        victim = self._random.choice(ranks.ranks)
        others = [] if kind == "pause" else [rank for rank in ranks.ranks if rank is not victim]
        os.kill(victim.pid, signal.SIGSTOP if kind in ("stop", "pause") else signal.SIGKILL)
        if kind == "pause":
            while time.monotonic() < start + self.limit_s / 3:
                ranks.watch(LOOK_S)
            os.kill(victim.pid, signal.SIGCONT)
        self._wait_for(ranks, others)
        ends = [(r, None if r.ended is None else r.ended - start) for r in others]
        survivors = [Survivor(r.number, seconds, r.status, _error(r, said)) for r, seconds in ends]
        self.faults.append(Fault(at_s, len(self.incarnations), kind, victim.number, survivors))
        return kind

    def _wait_for(self, ranks: Ranks, others: list[Rank]) -> None:
        end = time.monotonic() + self.limit_s + SLACK_S + RECORDING_S
        while any(rank.status is None for rank in others) and time.monotonic() < end:
            ranks.watch(LOOK_S)

    def _sample(self, ranks: Ranks) -> None:
        for rank in ranks.ranks:
            process = Path(f"/proc/{rank.pid}")
            with contextlib.suppress(OSError):  # it may have ended just now
                rollup = (process / "smaps_rollup").read_text().splitlines()
                memory = next(1024 * int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
                counts = (len(os.listdir(process / name)) for name in ("fd", "task"))
                here = (self._now(), len(self.incarnations), rank.number)
                self.samples.append(Sample(*here, memory, *counts, len(listening_ports(str(rank.pid)))))


def _error(rank: Rank, said: dict) -> str:
    """The error that a rank reported, or else its last output."""
    lines, start = list(said[rank.number]), f"rank {rank.number} failed: "
    found = [i for i, line in enumerate(lines) if line.startswith(start)]
    return "\n".join(lines[found[-1] :] if found else lines[-40:]).removeprefix(start)[:KEPT_TEXT]
