"""One incarnation: starts all ranks and watches them until the script ends, a rank is killed, or something fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...emulate import Cluster
from ...emulate.ranks import Rank, Ranks
from . import processes
from .records import Incarnation, Kill, Record, Survivor
from .work import Work

SAMPLE_S = 2.0
LOOK_S = 0.25
SLACK_S = 2.0  # beyond the time limit, for survivors to end
RECORDING_S = 8.0  # beyond that, to record how late they are
LAST_WORDS_S = 2.0
QUIET_S = 120.0  # without progress the ranks count as stuck
KEPT_LINES, KEPT_TEXT = 400, 1500
FRAME = re.compile(r'/(megatron_tree/[\w/]+|megatron/core/[\w/]+|launch/\w+)\.py", line \d+, in (\w+)')
MESSENGERS = ("megatron_tree/comm/", "megatron_tree/launching")  # where all waits fail


class KillPlan(NamedTuple):
    """Which rank to kill, with which signal, after how many seconds of work."""

    rank: int
    signal: signal.Signals
    after_s: float


class Run:
    """One incarnation of a round of work; `run` adds its results and samples to the record.

    Args:
        began: `time.monotonic()` at the start of the soak.
        show: gets a text on what is under way, several times a second.
    """

    def __init__(
        self, work: Work, round: int, folder: Path, record: Record, *, began: float, show: Callable[[str], None]
    ):
        self.work, self.number = work, len(record.incarnations)
        self.worked_s = 0.0  # seconds since the first result
        self._round, self._record, self._began, self._show = round, record, began, show
        self._argv, self._results = work.argv(folder, self.number), work.results(folder, self.number)
        self._first: int | None = None
        self._done = self._expected = work.saved(folder)
        self._answers = 0
        self._ready_s: float | None = None
        self._lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))
        self._shared_memory: set[str] = set()

    def run(self, cluster: Cluster, plan: KillPlan | None) -> Incarnation:
        """Run it until its end, or until the loss that `plan` says; adds it to the record."""
        began_s = self._now()
        with cluster.start_script(self._argv, on_line=lambda rank, line: self._lines[rank].append(line)) as ranks:
            failed, kill = self._watch(ranks, plan), None
            if not failed and ranks.unfinished():
                kill = self._kill(ranks, plan)
        self._read()
        incarnation = Incarnation(
            number=self.number,
            work=self.work.name,
            round=self._round,
            began_s=began_s,
            ready_s=self._ready_s,
            ended_s=self._now(),
            expected_first=self._expected,
            first=self._first,
            last=self._done,
            finished=kill is None and not failed,
            kill=kill,
            failed=failed,
            left=cluster.leftovers() + sorted(name for name in self._shared_memory if os.path.exists(name)),
        )
        self._record.incarnations.append(incarnation)
        return incarnation

    def _now(self) -> float:
        """Seconds since the start of the soak."""
        return time.monotonic() - self._began

    def _watch(self, ranks: Ranks, plan: KillPlan | None) -> str:
        """Until the plan is due or all have ended. Returns what failed, or ""."""
        progressed = sampled = self._now()
        while ranks.unfinished():
            ranks.watch(LOOK_S)
            now, before = self._now(), self._done
            self._read()
            if self._done != before:
                progressed = now
                self._ready_s = self._ready_s or now
            self.worked_s = now - (self._ready_s or now)
            if ranks.failed():
                self._wait_for(ranks, ranks.unfinished(), now)
                return "\n".join(f"rank {r.number}: status {r.status}: {self._error_of(r)}" for r in ranks.failed())
            if now - progressed > QUIET_S:
                self._abort(ranks, ranks.unfinished())
                return f"no progress within {QUIET_S:g} s; rank 0 was here: {self._error_of(ranks.ranks[0])}"
            complete = len(ranks.unfinished()) == len(ranks.ranks) and self._done < self.work.total
            if complete and now - sampled >= SAMPLE_S:  # not while plots are drawn at the end
                sampled = now
                self._sample(ranks)
            self._show(f"{self.work.name}: {self._done} of {self.work.total} {self.work.unit}")
            if plan is not None and self._ready_s is not None and self.worked_s >= plan.after_s:
                return ""
        return ""

    def _kill(self, ranks: Ranks, plan: KillPlan) -> Kill:
        lost = ranks.ranks[plan.rank]
        others = [rank for rank in ranks.ranks if rank is not lost]
        killed, at_s = time.monotonic(), self._now()
        os.kill(lost.pid, plan.signal)
        self._wait_for(ranks, others, at_s)
        late = [rank for rank in others if rank.status is None]
        self._abort(ranks, late)
        survivors = [
            Survivor(r.number, None if r in late else r.ended - killed, r.status, self._error_of(r)) for r in others
        ]
        return Kill(at_s, lost.number, plan.signal.name, self._during(others), survivors)

    def _wait_for(self, ranks: Ranks, others: list[Rank], since_s: float) -> None:
        end_s = since_s + self._record.limit_s + SLACK_S + RECORDING_S
        while any(rank.status is None for rank in others) and self._now() < end_s:
            ranks.watch(LOOK_S)
            self._show(f"{self.work.name}: waiting for the survivors to end")

    def _abort(self, ranks: Ranks, late: list[Rank]) -> None:
        """Have late ranks print their stacks and end."""
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGABRT)
        end_s = self._now() + LAST_WORDS_S
        while any(rank.status is None for rank in late) and self._now() < end_s:
            ranks.watch(0.1)

    def _read(self) -> None:
        """Read new results."""
        record = self._record
        for line in self._results.lines():
            if "first_step" in line:
                self._first = line["first_step"] - 1
            elif line.get("event") == "validation":
                record.seen_losses.append((self.number, "valid", line["loss"]))
            elif "step" in line:
                self._done = line["step"]
                record.seen_losses.append((self.number, str(line["step"]), line["loss"]))
                record.step_times.append((self._now(), self.number, line["step"]))
            elif "id" in line:
                self._answers += 1
                if self._answers > self._expected:
                    self._first, self._done = self._expected, self._answers

    def _sample(self, ranks: Ranks) -> None:
        at_s = self._now()
        for who, pid in [("parent", os.getpid()), *((str(rank.number), rank.pid) for rank in ranks.ranks)]:
            with contextlib.suppress(OSError):  # it may have ended just now
                self._record.samples.append(processes.sample(pid, at_s=at_s, incarnation=self.number, who=who))
                self._shared_memory |= processes.shared_memory_of(pid)

    def _error_of(self, rank: Rank) -> str:
        """The error that a rank reported, or else its last output."""
        lines = list(self._lines[rank.number])
        start = f"rank {rank.number} failed: "
        found = [i for i, line in enumerate(lines) if line.startswith(start)]
        text = "\n".join(lines[found[-1] :] if found else lines[-40:])
        return text.removeprefix(start)[:KEPT_TEXT]

    def _during(self, survivors: list[Rank]) -> str:
        """The innermost function outside of comm/ in most survivors' tracebacks."""
        places = Counter()
        for rank in survivors:
            frames = FRAME.findall("\n".join(self._lines[rank.number]))
            frames = [f"{file}.{name}" for file, name in frames if not file.startswith(MESSENGERS)]
            places.update(frames[-1:])
        return places.most_common(1)[0][0].replace("/", ".") if places else ""
