"""The verdict on a soak: each rule compares what was found in the record with what is allowed."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from .incarnation import SLACK_S
from .records import Kill, Record, Sample

LOSS_ALLOWED = 1e-6  # relative
LOGPROB_ALLOWED = 1e-4  # absolute: after a restart a row is batched with other rows
WARM_S = 20.0  # seconds of an incarnation's work that do not count for its memory
SHORTEST_S = 20.0  # of samples after that, to determine growth
JUDGED_S = 300.0  # a soak of this length must have incarnations whose memory growth can be determined
MEMORY = ("rss", "anonymous")
GROWTH_ALLOWED = 0.01
PARENT_ALLOWED = 0.02  # it keeps the record
SHOWN = 3
ACCUSED = re.compile(r"\branks? \[?(\d+(?:, \d+)*)\]?,?[^.:;()]{0,60}?\b(?:is|are|has|have|did|does|do) ")


class Check(NamedTuple):
    """One rule and its result."""

    name: str
    found: float
    allowed: float
    """The largest value of `found` that is ok."""
    text: str

    @property
    def ok(self) -> bool:
        return self.found <= self.allowed  # not so for nan


def _none(name: str, items: Sequence, text: str) -> Check:
    """The rule that there are no such items."""
    return Check(name, len(items), 0, text + _listed(items))


def _listed(items: Sequence) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f": {'; '.join(map(str, items[:SHOWN]))}{more}" if items else ""


def judge(record: Record) -> list[Check]:
    """All checks of a record."""
    found = [*_about_losses(record), *_about_answers(record), *_about_survivors(record), *_about_restarts(record)]
    return [*found, *_about_memory(record), *_about_counts(record), *_about_leftovers(record)]


def _about_losses(record: Record) -> Iterable[Check]:
    if not record.losses:
        return
    wrong, errors, same = [], [0.0], 0
    for number, step, loss in record.seen_losses:
        expected = record.losses.get(step, float("nan"))
        error = abs(loss - expected) / abs(expected)
        same += loss == expected
        errors.append(error)
        if not error <= LOSS_ALLOWED:
            wrong.append(f"step {step} in incarnation {number}: {loss!r} instead of {expected!r}")
    total = len(record.seen_losses)
    worst = max(errors) if all(e == e for e in errors) else float("nan")
    text = f"{total} losses, {same} bit for bit those of the undisturbed run{_listed(wrong)}"
    yield Check("losses: largest relative difference", worst, LOSS_ALLOWED, text)
    done = {step for _, step, _ in record.seen_losses}
    missing = sorted(set(record.losses) - done, key=str)
    yield _none("losses: steps never done", missing, f"of {len(record.losses)}")


def _about_answers(record: Record) -> Iterable[Check]:
    if not record.answers:
        return
    by_round: dict[int, list] = defaultdict(list)
    for number, answer in record.seen_answers:
        by_round[number].append(answer)
    lost, doubled, other, worst = [], [], [], 0.0
    for number, answers in by_round.items():
        counts = Counter(answer.id for answer in answers)
        doubled += [f"{i} in round {number}" for i, n in counts.items() if n > 1]
        lost += [f"{i} in round {number}" for i in record.answers.keys() - counts.keys()]
        for answer in answers:
            truth = record.answers.get(answer.id)
            if truth is None or truth.tokens != answer.tokens:
                other.append(f"{answer.id} in round {number}")
                continue
            pairs = zip(chain(*truth.logprobs), chain(*answer.logprobs), strict=True)
            worst = max([worst, *(abs(x - y) for x, y in pairs)])
    rounds = f"{len(record.seen_answers)} answers in {len(by_round)} finished rounds of {len(record.answers)}"
    yield Check("answers: rounds never finished", int(not by_round), 0, rounds)
    yield _none("answers: lost", lost, rounds)
    yield _none("answers: doubled", doubled, rounds)
    yield _none("answers: other tokens", other, "than in the undisturbed run")
    yield Check("answers: largest difference of a logprob", worst, LOGPROB_ALLOWED, "nats")


def _about_survivors(record: Record) -> Iterable[Check]:
    kills = [x.kill for x in record.incarnations if x.kill]
    if not kills:
        yield Check("kills: none", 1, 0, "no rank was lost: nothing was tested")
        return
    survivors = [(kill, x) for kill in kills for x in kill.survivors]
    stuck = [f"rank {x.rank} at {_clock(kill)}" for kill, x in survivors if x.seconds is None]
    yield _none("survivors: never ended", stuck, f"of {len(survivors)}")
    times = [x.seconds for _, x in survivors if x.seconds is not None]
    killed = [x.seconds for kill, x in survivors if x.seconds is not None and kill.signal == "SIGKILL"]
    text = f"after a kill within {max(killed, default=0):.1f} s, median {statistics.median(killed or [0]):.1f} s"
    yield Check("survivors: seconds to the end of the slowest", max(times, default=0), record.limit_s + SLACK_S, text)
    fine = [f"rank {x.rank} at {_clock(kill)}" for kill, x in survivors if x.status == 0]
    yield _none("survivors: ended as if nothing had happened", fine, f"of {len(survivors)}")
    silent = [f"rank {x.rank} at {_clock(kill)}" for kill, x in survivors if accused(x.said) != {kill.rank}]
    text = f"of {len(survivors)} did not name the lost rank, and it alone"
    yield _none("survivors: without its name", silent, text)


def accused(text: str) -> set[int]:
    """Ranks that an error says did not respond, or failed."""
    return {int(number) for numbers in ACCUSED.findall(text) for number in numbers.split(", ")}


def _clock(kill: Kill) -> str:
    return f"{kill.at_s:.0f} s"


def _about_restarts(record: Record) -> Iterable[Check]:
    failed = [f"incarnation {x.number}: {x.failed}" for x in record.incarnations if x.failed]
    text = f"incarnations of {len(record.incarnations)} failed by themselves"
    yield _none("restarts: failures without a lost rank", failed, text)
    wrong, done = [], {}
    for x in record.incarnations:
        before = done.get((x.work, x.round), 0)
        lost = before - x.expected_first
        if x.first is not None and x.first != x.expected_first:
            wrong.append(f"incarnation {x.number} went on from {x.first}, {x.expected_first} were on the disk")
        if lost > (record.save_interval if x.work == "train" else 0):
            wrong.append(f"incarnation {x.number}: {x.expected_first} on the disk of {before} that were done")
        done[x.work, x.round] = max(before, x.last)
    yield _none("restarts: not from the newest checkpoint", wrong, "incarnations")


def growth(samples: list[Sample], field: str) -> float:
    """Relative growth of a field's peak over the samples: from the peak in their first third to that in their last.

    The middles of these thirds are two thirds of the time apart, so the difference is multiplied by 1.5. Peaks are
    used because a process forked for a checkpoint shares its parent's pages while it lives.
    """
    third = -(-len(samples) // 3)
    first, last = (max(getattr(s, field) for s in part) for part in (samples[:third], samples[-third:]))
    return 1.5 * (last / first - 1)


def warm_samples(record: Record, number: int | None = None) -> dict[tuple[int, str], list[Sample]]:
    """{(incarnation, process): samples after its warm-up}, if there are enough to determine growth.

    number: of this incarnation only; None: of all.
    """
    ready = {x.number: x.ready_s for x in record.incarnations if x.ready_s is not None}
    found: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    for s in record.samples:
        if number not in (None, s.incarnation):
            continue
        if s.incarnation in ready and s.at_s >= ready[s.incarnation] + WARM_S:
            found[s.incarnation, s.who].append(s)
    return {key: s for key, s in found.items() if s[-1].at_s - s[0].at_s >= SHORTEST_S}


def _about_memory(record: Record) -> Iterable[Check]:
    warm = warm_samples(record)
    for field in MEMORY:
        inside = {key: growth(samples, field) for key, samples in warm.items() if key[1] != "parent"}
        where, most = max(inside.items(), key=lambda x: x[1], default=(None, 0.0))
        if not inside and record.samples and record.samples[-1].at_s > JUDGED_S:
            most = float("nan")
        text = f"of itself, at most; {len(inside)} processes"
        if where:
            text += f"; the most in rank {where[1]} of incarnation {where[0]}"
        yield Check(f"memory: growth inside an incarnation, {field}", most, GROWTH_ALLOWED, text)
        for work in dict.fromkeys(x.work for x in record.incarnations):
            yield from _about_incarnations(record, work, warm, field)
        parent = [s for s in record.samples if s.who == "parent" and s.at_s > WARM_S]
        if len(parent) > 2:
            first, middle, last = (getattr(parent[i], field) / 1e6 for i in (0, len(parent) // 2, -1))
            # the allocator's arenas grow in the first half; a leak continues in the second
            rise = growth(parent[len(parent) // 2 :], field)
            text = f"in the second half: {first:.1f} MB at first, {middle:.1f} in the middle, {last:.1f} at last"
            yield Check(f"memory: growth of the parent, {field}", rise, PARENT_ALLOWED, text)


def _about_incarnations(record: Record, work: str, warm: dict, field: str) -> Iterable[Check]:
    """What ranks hold beyond what they were forked with, by linear regression over all incarnations of one work."""
    forked = {s.incarnation: getattr(s, field) for s in reversed(record.samples) if s.who == "parent"}
    peaks: dict[int, list[int]] = defaultdict(list)
    for (n, who), samples in sorted(warm.items()):
        if who != "parent" and record.incarnations[n].work == work:
            peaks[n].append(max(getattr(s, field) for s in samples))
    own = [statistics.fmean(values) - forked[n] for n, values in peaks.items()]
    if len(own) > 2:
        rise = statistics.linear_regression(range(len(own)), own).slope * (len(own) - 1)
        whole = statistics.fmean(max(values) for values in peaks.values())
        text = f"a rank's MB beyond its parent: {', '.join(f'{x / 1e6:.1f}' for x in own)}"
        yield Check(f"memory: growth over incarnations of {work}, {field}", rise / whole, GROWTH_ALLOWED, text)


def _about_counts(record: Record) -> Iterable[Check]:
    """Counts that rise during a checkpoint must return to their minimum."""
    warm = warm_samples(record)
    for field in ("fds", "threads", "ports"):
        rises, floors = [], []
        for (n, who), samples in warm.items():
            if who == "parent" and field == "ports":  # its ports are the machine's
                continue
            values = [getattr(s, field) for s in samples]
            third = -(-len(values) // 3)
            first, last = min(values[:third]), min(values[-third:])
            floors.append(min(values))
            if last > first:
                rises.append(f"{who} in incarnation {n}: {first}, then {last}")
        parent = [s for s in record.samples if s.who == "parent"]
        firsts = {s.incarnation: getattr(s, field) for s in reversed(parent)}
        if field != "ports" and len(firsts) > 2 and firsts[max(firsts)] > firsts[min(firsts)]:
            rises.append(
                f"the parent: {firsts[min(firsts)]} in the first incarnation, {firsts[max(firsts)]} in the last"
            )
        text = f"of processes, whose numbers were {min(floors, default=0)} to {max(floors, default=0)}"
        yield _none(f"rising numbers of {field}", rises, text)


def _about_leftovers(record: Record) -> Iterable[Check]:
    left = [f"after incarnation {x.number}: {what}" for x in record.incarnations for what in x.left]
    text = f"processes, ports, shared memory after {len(record.incarnations)} incarnations"
    yield _none("left behind by an incarnation", left, text)
    text = "processes, namespaces, shared memory and files after the end"
    yield _none("left behind at the end", record.left, text)
