"""The verdict on a soak: each rule compares what was found in the record with what is allowed."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .soak import SLACK_S, Sample, Soak
from .work import SAVE_INTERVAL

SHORTEST_S = 20.0  # of samples, to determine growth
JUDGED_S = 300.0  # a soak of this length must have processes whose growth can be determined
GROWTH_ALLOWED = 0.01
SHOWN = 3
ACCUSED = re.compile(r"\branks? \[?(\d+(?:, \d+)*)\]?,?[^.:;()]{0,60}?\b(?:is|are|has|have|did|does|do) ")


class Check(NamedTuple):
    """One rule and its result; `allowed` is the largest value of `found` that is ok."""

    name: str
    found: float
    allowed: float
    text: str

    @property
    def ok(self) -> bool:
        return self.found <= self.allowed  # not so for nan


def judge(soak: Soak) -> list[Check]:
    """All checks of a record."""
    return [*_results(soak), *_survivors(soak), *_restarts(soak), *_growth(soak)]


def _none(name: str, items: Sequence, text: str) -> Check:
    """The rule that there are no such items."""
    more = f" and {len(items) - SHOWN} more" * (len(items) > SHOWN)
    return Check(name, len(items), 0, f"{text}: {'; '.join(map(str, items[:SHOWN]))}{more}" if items else text)


def _results(soak: Soak) -> Iterable[Check]:
    for name, work in soak.works.items():
        rounds: dict[int, list] = defaultdict(list)
        for result in soak.results:
            if result.work == name:
                rounds[result.round].append(result)
        truth = {x.key: x.value for x in rounds.pop(0, [])}
        found = [x for results in rounds.values() for x in results]
        worst, wrong = 0.0, []
        for x in found:
            error = work.difference(truth[x.key], x.value) if x.key in truth else float("inf")
            worst = worst if error <= worst or worst != worst else error  # nan stays
            wrong += [] if error <= work.allowed else [f"{x.key} in incarnation {x.incarnation}"]
        same = f"{len(found)} results, {sum(x.value == truth.get(x.key) for x in found)} those of the undisturbed round"
        yield Check(f"{name}: largest difference", worst, work.allowed, same)
        yield _none(f"{name}: wrong results", wrong, same)
        ended = {x.round for x in soak.incarnations if x.work == name and x.last == work.total} - {0}
        yield Check(f"{name}: no finished round", int(not ended), 0, f"{len(ended)} rounds")
        counts = {r: Counter(x.key for x in rounds[r]) for r in ended}
        lost = [f"{key} in round {r}" for r in counts for key in truth if key not in counts[r]]
        yield _none(f"{name}: lost results", lost, f"of {len(truth)} in every round")
        doubled = [f"{key} in round {r}" for r in counts for key, n in counts[r].items() if n > 1 and work.once]
        yield _none(f"{name}: doubled results", doubled, f"of {len(found)}")


def _survivors(soak: Soak) -> Iterable[Check]:
    yield Check("faults: none", int(not soak.faults), 0, ", ".join(f"{f.kind} {f.rank}" for f in soak.faults))
    found = [(fault, x) for fault in soak.faults for x in fault.survivors]
    times = [x.seconds for _, x in found if x.seconds is not None] or [0.0]
    text = f"within {max(times):.1f} s, median {statistics.median(times):.1f} s"
    yield Check("survivors: seconds to the end of the slowest", max(times), soak.limit_s + SLACK_S, text)
    for name, bad in (
        ("never ended", lambda fault, x: x.seconds is None),
        ("ended as if nothing had happened", lambda fault, x: x.status == 0),
        ("did not name the lost rank, and it alone", lambda fault, x: accused(x.said) != {fault.rank}),
    ):
        items = [f"rank {x.rank} at {fault.at_s:.0f} s" for fault, x in found if bad(fault, x)]
        yield _none(f"survivors: {name}", items, f"of {len(found)}")


def accused(text: str) -> set[int]:
    """Ranks that an error says did not respond, or failed."""
    return {int(number) for numbers in ACCUSED.findall(text) for number in numbers.split(", ")}


def _restarts(soak: Soak) -> Iterable[Check]:
    total = f"of {len(soak.incarnations)} incarnations"
    failed = [f"incarnation {x.number}: {x.failed}" for x in soak.incarnations if x.failed]
    yield _none("restarts: failures without a lost rank", failed, total)
    damaged, wrong, before = {f.incarnation for f in soak.faults if f.kind == "damage"}, [], {}
    for x in soak.incarnations:
        done, number = before.get((x.work, x.round), (0, None))
        if x.resumed is not None and x.resumed != x.expected:
            wrong.append(f"incarnation {x.number} went on from {x.resumed}, {x.expected} were on the disk")
        if done - x.expected > (SAVE_INTERVAL * (1 + (number in damaged)) if x.work == "train" else 0):
            wrong.append(f"incarnation {x.number}: {x.expected} on the disk of {done} that were done")
        before[x.work, x.round] = x.last, x.number
    yield _none("restarts: not from the newest good files", wrong, total)
    left = [f"after incarnation {x.number}: {what}" for x in soak.incarnations for what in x.left]
    yield _none("left behind", left + soak.left, "processes, ports and files")


def by_process(soak: Soak) -> dict[tuple[int, int], list[Sample]]:
    """{(incarnation, rank): samples}, if there are enough to determine growth."""
    found: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in soak.samples:
        found[sample.incarnation, sample.rank].append(sample)
    return {key: s for key, s in found.items() if s[-1].at_s - s[0].at_s >= SHORTEST_S}


def growth(samples: list[Sample], field: str) -> float:
    """Relative growth of a field from the first third of the samples to the last.

    Memory: of its peak, because a process forked for a checkpoint shares its parent's pages while it lives; counts: of
    their minimum, because they rise during a checkpoint.
    """
    of, third = max if field == "memory" else min, -(-len(samples) // 3)
    first, last = (of(getattr(s, field) for s in part) for part in (samples[:third], samples[-third:]))
    return last / first - 1


def _growth(soak: Soak) -> Iterable[Check]:
    processes = by_process(soak)
    for field in Sample._fields[3:]:
        rises = {f"rank {rank} of incarnation {n}": growth(s, field) for (n, rank), s in processes.items()}
        most = max(rises.values(), default=float("nan") if soak.incarnations[-1].ended_s > JUDGED_S else 0.0)
        text = f"in {len(rises)} processes" + (f", most in {max(rises, key=rises.get)}" if rises else "")
        yield Check(f"growth of {field}", most, GROWTH_ALLOWED if field == "memory" else 0.0, text)
