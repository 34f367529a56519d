"""One start of all ranks, watched from outside until the script is through, a rank is taken out, or something fails."""

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
RECORDING_S = 8.0  # beyond that, to see how late they are
LAST_WORDS_S = 2.0
QUIET_S = 120.0  # without anything new: stuck
KEPT_LINES, KEPT_TEXT = 400, 1500
FRAME = re.compile(r'/(megatron_tree/[\w/]+|megatron/core/[\w/]+|launch/\w+)\.py", line \d+, in (\w+)')
MESSENGERS = ("megatron_tree/comm/", "megatron_tree/launching")  # where all waits fail


class Plan(NamedTuple):
    """Whom to take out, how, and after how many seconds of work."""

    rank: int
    signal: signal.Signals
    after_s: float


class Live:
    """An incarnation under way. `run` is all of it; what it saw goes into the record.

    Args:
        began: `time.monotonic()` when the soak began.
        tell: gets what is going on, for people, several times a second.
    """

    def __init__(
        self, work: Work, folder: Path, number: int, record: Record, *, began: float, tell: Callable[[str], None]
    ):
        self.work, self.number = work, number
        self.first: int | None = None
        self.done = self.expected = work.saved(folder)
        self.worked_s = 0.0
        """Seconds since its first result."""
        self._argv, self._results = work.argv(folder, number), work.results(folder, number)
        self._record, self._began, self._tell = record, began, tell
        self._lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))
        self._shared_memory: set[str] = set()
        self.ready_s: float | None = None

    def run(self, cluster: Cluster, plan: Plan | None) -> tuple[Kill | None, str, list[str]]:
        """Returns: (the loss of a rank, what failed without it or "", what was left behind)."""
        say = lambda rank, line: self._lines[rank].append(line)  # noqa: E731
        with cluster.start_script(self._argv, on_line=say) as ranks:
            failed, kill = self._watch(ranks, plan), None
            if not failed and ranks.unfinished():
                kill = self._kill(ranks, plan)
        self._read()
        left = cluster.leftovers() + sorted(name for name in self._shared_memory if os.path.exists(name))
        return kill, failed, left

    def _watch(self, ranks: Ranks, plan: Plan | None) -> str:
        """Until the plan is due or all have ended. Returns what failed, or ""."""
        news = sampled = time.monotonic()
        while ranks.unfinished():
            ranks.watch(LOOK_S)
            now, before = time.monotonic(), self.done
            self._read()
            if self.done != before:
                news = now
                self.ready_s = self.ready_s or now - self._began
            if self.ready_s is not None:
                self.worked_s = now - self._began - self.ready_s
            if ranks.failed():
                self._wait_for(ranks, ranks.unfinished(), now)
                return "\n".join(f"rank {r.number}: status {r.status}: {self._said(r)}" for r in ranks.failed())
            if now - news > QUIET_S:
                self._ask(ranks, ranks.unfinished())
                return f"nothing new for {QUIET_S:g} s; rank 0 was here: {self._said(ranks.ranks[0])}"
            whole = len(ranks.unfinished()) == len(ranks.ranks) and self.done < self.work.total  # then plots are drawn
            if whole and now - sampled >= SAMPLE_S:
                sampled = now
                self._sample(ranks)
            self._tell(f"{self.work.name}: {self.done} of {self.work.total} {self.work.unit}")
            if plan is not None and self.ready_s is not None and self.worked_s >= plan.after_s:
                return ""
        return ""

    def _kill(self, ranks: Ranks, plan: Plan) -> Kill:
        lost = ranks.ranks[plan.rank]
        others = [rank for rank in ranks.ranks if rank is not lost]
        struck = time.monotonic()
        os.kill(lost.pid, plan.signal)
        self._wait_for(ranks, others, struck)
        late = [rank for rank in others if rank.status is None]
        self._ask(ranks, late)
        survivors = [
            Survivor(r.number, None if r in late else r.ended - struck, r.status, self._said(r)) for r in others
        ]
        return Kill(struck - self._began, lost.number, plan.signal.name, self._during(others), survivors)

    def _wait_for(self, ranks: Ranks, others: list[Rank], since: float) -> None:
        end = since + self._record.limit_s + SLACK_S + RECORDING_S
        while any(rank.status is None for rank in others) and time.monotonic() < end:
            ranks.watch(LOOK_S)
            self._tell(f"{self.work.name}: waiting for the survivors to end")

    def _ask(self, ranks: Ranks, late: list[Rank]) -> None:
        """Have late ranks print where they are, and end."""
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGABRT)
        end = time.monotonic() + LAST_WORDS_S
        while any(rank.status is None for rank in late) and time.monotonic() < end:
            ranks.watch(0.1)

    def _read(self) -> None:
        """Take in new results."""
        record = self._record
        for line in self._results.lines():
            if "first_step" in line:
                self.first = line["first_step"] - 1
            elif line.get("event") == "validation":
                record.seen_losses.append((self.number, "valid", line["loss"]))
            elif "step" in line:
                self.done = line["step"]
                record.seen_losses.append((self.number, str(line["step"]), line["loss"]))
                record.step_times.append((time.monotonic() - self._began, self.number, line["step"]))
            elif "id" in line:
                self._answers += 1
                if self._answers > self.expected:
                    self.first, self.done = self.expected, self._answers

    _answers = 0

    def _sample(self, ranks: Ranks) -> None:
        at_s = time.monotonic() - self._began
        for who, pid in [("parent", os.getpid()), *((str(rank.number), rank.pid) for rank in ranks.ranks)]:
            with contextlib.suppress(OSError):  # it may have ended just now
                self._record.samples.append(processes.look(pid, at_s=at_s, incarnation=self.number, who=who))
                self._shared_memory |= processes.shared_memory_of(pid)

    def _said(self, rank: Rank) -> str:
        """The error that a rank ended with, or the last that it said."""
        lines = list(self._lines[rank.number])
        start = f"rank {rank.number} failed: "
        found = [i for i, line in enumerate(lines) if line.startswith(start)]
        text = "\n".join(lines[found[-1] :] if found else lines[-40:])
        return text.removeprefix(start)[:KEPT_TEXT]

    def _during(self, survivors: list[Rank]) -> str:
        """The innermost function that most survivors were in, below what waits for messages."""
        places = Counter()
        for rank in survivors:
            frames = FRAME.findall("\n".join(self._lines[rank.number]))
            frames = [f"{file}.{name}" for file, name in frames if not file.startswith(MESSENGERS)]
            places.update(frames[-1:])
        return places.most_common(1)[0][0].replace("/", ".") if places else ""


def incarnate(
    cluster: Cluster,
    work: Work,
    round: int,
    folder: Path,
    plan: Plan | None,
    record: Record,
    *,
    began: float,
    tell: Callable[[str], None],
) -> tuple[Incarnation, float]:
    """One incarnation of a round of work, put into the record. Returns: (it, its seconds of work)."""
    began_s = time.monotonic() - began
    live = Live(work, folder, len(record.incarnations), record, began=began, tell=tell)
    kill, failed, left = live.run(cluster, plan)
    incarnation = Incarnation(
        number=live.number,
        work=work.name,
        round=round,
        began_s=began_s,
        ready_s=live.ready_s,
        ended_s=time.monotonic() - began,
        expected_first=live.expected,
        first=live.first,
        last=live.done,
        finished=kill is None and not failed,
        kill=kill,
        failed=failed,
        left=left,
    )
    record.incarnations.append(incarnation)
    return incarnation, live.worked_s
