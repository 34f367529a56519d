"""After a failure: every rank reports what it saw, and all ranks come to one conclusion about which rank failed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import CommError
from .store import set_first

GATHER_S = 0.8  # for the other ranks' reports
TAKE_OVER_S = 0.5  # more, after which the conclusion is not left to the first rank that reported
DIFFERENT_CALLS = "the ranks of cp_group make different calls, or in another order"
LINGER_S = 0.7  # that the process which hosts the store stays for the others to read the conclusion


@dataclass(frozen=True)
class Report:
    """What one rank saw of a failure."""

    what: str
    suspects: tuple[int, ...] = ()
    """The ranks that it waited for."""
    cause: str = ""
    """"error" or "input" where this rank raised by itself, "calls" where it met ranks in other calls; else empty."""
    limit_s: float | None = None
    """The time limit, where it ran out."""


class Reports:
    """The reports of one group, in the job's store.

    key: makes names of keys; ranks: global numbers; later_s: seconds by which the ranks of a large job see a report
    later than those of a small one.
    """

    def __init__(self, key: Callable[..., str], rank: int, ranks: tuple[int, ...], *, later_s: float):
        self._key, self._rank, self._ranks, self._later_s = key, rank, ranks, later_s
        self._number = 0  # of this rank's own report, from 1
        self._has_read = False

    def exist(self, store) -> bool:
        """Whether any rank has reported."""
        return store.check([self._key("failed")])

    def add(self, store, report: Report):
        """A request: write down this rank's report, its first one alone."""
        yield
        if self._number:
            return
        if report.cause in ("error", "input"):
            cause = {"kind": report.cause, "rank": self._rank, "what": report.what}
            set_first(store, self._key("cause"), json.dumps(cause))
        self._number = store.add(self._key("num_reports"), 1)
        text = json.dumps({"rank": self._rank, **dataclasses.asdict(report)})
        store.set(self._key("report", self._number), text)
        store.set(self._key("failed"), "1")
        store.add(self._key("updates"), 1)

    def conclude(self, store, report: Report):
        """A request: report, and return the error that all ranks raise. The first rank that reported concludes."""
        yield from self.add(store, report)
        end, reports, numbers = time.monotonic() + GATHER_S + self._later_s, {}, set()
        take_over = end + TAKE_OVER_S if self._number > 1 else 0.0
        while not store.check([self._key("conclusion")]):
            if time.monotonic() > take_over:
                yield from self._gather(store, reports, numbers)
                silent = {r for report in reports.values() for r in report["suspects"]} - set(reports)
                world = len(self._ranks)
                complete = (len(silent) == 1 and len(reports) == world - 1) or len(reports) == world
                if complete or store.check([self._key("cause")]) or time.monotonic() > end:
                    silent = silent or set(range(world)) - set(reports)
                    set_first(store, self._key("conclusion"), self._conclusion(store, reports, sorted(silent)))
            yield
        conclusion = json.loads(store.get(self._key("conclusion")))
        if not self._has_read:
            self._has_read = True
            store.add(self._key("num_read"), 1)
        yield from self._linger(store)
        text = conclusion["text"]
        return ValueError(text) if conclusion["input"] else CommError(text, tuple(conclusion["ranks"]))

    def _gather(self, store, reports: dict[int, dict], numbers: set[int]):
        for number in set(range(1, store.add(self._key("num_reports"), 0) + 1)) - numbers:
            if store.check([self._key("report", number)]):
                report = json.loads(store.get(self._key("report", number)))
                numbers.add(number)
                reports[report["rank"]] = report
            if number % 64 == 0:
                yield

    def _conclusion(self, store, reports: dict[int, dict], silent: list[int]) -> str:
        if store.check([self._key("cause")]):
            cause = json.loads(store.get(self._key("cause")))
            ranks, text = [self._ranks[cause["rank"]]], cause["what"]
            if cause["kind"] != "input":
                text = f"rank {ranks[0]} failed: {text}"
            return json.dumps({"input": cause["kind"] == "input", "ranks": ranks, "text": text})
        by_rank = [reports[rank] for rank in sorted(reports)]
        if differing := [report["what"] for report in by_rank if report["cause"] == "calls"]:
            text = f"{DIFFERENT_CALLS}: {'; '.join(differing)}"
            return json.dumps({"input": True, "ranks": [], "text": text})
        ranks = [self._ranks[r] for r in silent]
        waited = [report for report in by_rank if report["suspects"]]
        what = (waited or by_rank)[0]["what"]
        limits = [report["limit_s"] for report in waited if report["limit_s"] is not None]
        return json.dumps({"input": False, "ranks": ranks, "text": _blame(ranks, what, min(limits, default=None))})

    def _linger(self, store):
        """The process of rank 0 usually hosts the store: when it ends, the others can't read the conclusion."""
        end = time.monotonic() + LINGER_S + self._later_s
        while self._ranks[self._rank] == 0 and time.monotonic() < end:
            if store.add(self._key("num_read"), 0) >= len(self._ranks):
                return
            yield


def _blame(ranks: list[int], what: str, limit_s: float | None) -> str:
    if not ranks:
        return f"all ranks respond, but they wait for one another in different operations: {what}"
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    if what.startswith(f"{who} did not respond"):  # concluded in a smaller group, and now once more in the whole job
        return what
    limit = "" if limit_s is None else f" within {limit_s:g} s"
    return f"{who} did not respond{limit}: {what}"
