"""Calls that measure their plans: a call that is repeated tries a few of them in turns, and keeps the fastest.

Every plan gives the exact result, so a turn costs nothing but the time by which its plan is slower. Every rank times
its passes. A turn ends when the ranks find, in a vote of one small message, that all have measured enough and that none
has a call whose backward is still to come: activation checkpointing runs such a forward again, which must then save the
same tensors. The last vote of a round carries the times of the slowest rank, by which all choose.

Whose turn it is, and when a vote is due, follows from the number of calls. It is the same on all ranks of a usable
group: an error after which a group can still be used is raised before the call has a plan, on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import weakref
from collections.abc import Callable

import torch

from .. import comm
from ..comm.group import GroupState
from ..log import say_once
from ..plan import Topology, TrainingPlan
from ..plan.alternatives import Plan, alternatives, passes_of
from ..units import format_seconds

CALLS_BEFORE = 8  # and one for every rank, as plans for many take longer to make: only what is repeated comes to trials
ROUNDS = 2  # of turns
SLOW = 1.5  # times the fastest: slower plans have one turn only
SAMPLES = 4  # of both passes in a turn; the first is not counted: it makes groups and buffers
MOST_SAMPLES = 16
PATIENCE = 128  # votes in vain, after which they come less and less often
KINDS_KNOWN = 256  # kinds of calls that a group counts
KINDS_TRIED = 32  # of which it tries plans
FORWARD, BACKWARD = 0, 1


class Tuning:
    """What is known of one kind of call in one group."""

    def __init__(self, plan_on: Callable[..., Plan], topology: Topology):
        self.plan = plan_on(topology=topology)
        """What calls of this kind take now, on all ranks."""
        self.settled = False
        """Whether they will always take it."""
        self.tried: tuple[Plan, ...] = ()
        self._alternatives = functools.partial(alternatives, plan_on, topology)
        self._calls = 0
        self._turns: list[int] = []  # indices of plans: the current round's turns still to come, the current one first
        self._round = 0
        self._times: list[list[Times]] = []  # by plan
        self._open: weakref.WeakSet[Turn] = weakref.WeakSet()  # between forward and backward
        self._step = self._period = 0  # the latest call that found none of them, and calls from one such to the next
        self._next_vote = self._in_vain = 0

    @staticmethod
    def of(group, kind: tuple) -> Tuning | None:
        """The group's tuning of one kind of call, once begun."""
        return GroupState.of(group).tunings.get(kind)

    @classmethod
    def begin(cls, group, kind: tuple, plan_on: Callable[..., Plan], topology: Topology) -> Tuning:
        """Begin it. plan_on: the call's plan, of a topology."""
        known = GroupState.of(group).tunings
        if len(known) >= KINDS_KNOWN:
            del known[next(kind for kind, tuning in known.items() if not tuning.tried)]
        tuning = known[kind] = cls(plan_on, topology)
        return tuning

    def next_turn(self, group, device: torch.device, timeout_s: float, measured: bool = True) -> Turn | None:
        """Count a call; its turn, if one is under way and the call is of use for it. A vote may be due here."""
        if self.settled or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        self._calls += 1
        if self.tried:
            if not self._open:
                self._step, self._period = self._calls, self._calls - self._step
            if self._calls >= self._next_vote:
                self._vote(group, device, timeout_s)
        elif self._calls > CALLS_BEFORE + comm.group_size(group):
            self._begin(GroupState.of(group).tunings.values())
        if self.settled or not self.tried or not measured:
            return None
        turn = Turn(self._times[self._turns[0]][-1], self._open)
        if isinstance(self.plan, TrainingPlan):
            self._open.add(turn)
        return turn

    def _begin(self, known) -> None:
        if sum(bool(tuning.tried) for tuning in known) >= KINDS_TRIED:
            self.settled = True
            return
        self.tried = self._alternatives()
        self.settled = len(self.tried) == 1
        self._times = [[] for _ in self.tried]
        self._take_turns(range(len(self.tried)))
        self._step, self._next_vote = self._calls, self._calls + 1

    def _take_turns(self, indices) -> None:
        self._turns = list(indices)
        self.plan = self.tried[self._turns[0]]
        self._times[self._turns[0]].append(tuple([] for _ in passes_of(self.plan)))

    def _vote(self, group, device: torch.device, timeout_s: float) -> None:
        """Go on to the next turn if all ranks are ready, which they are between steps: the next vote is due when a rank
        expects its next step. While nothing goes backward it is put off further and further."""
        times, last = self._times[self._turns[0]][-1], len(self._turns) == 1
        ready = not self._open and min(map(len, times)) >= SAMPLES
        expected = self._step + self._period
        if expected <= self._calls:
            expected = self._calls + max(1, self._in_vain - PATIENCE)
        if not self._open and not times[0]:
            expected = 2 * self._calls
        parts = range(len(times))
        medians = [_median(x, which) if ready else 0.0 for x in self._times * last for which in parts]
        vote = torch.tensor([not ready, expected, *medians], dtype=torch.float64, device=device)
        busy, expected, *slowest = comm.all_reduce(vote, group, op="max", timeout_s=timeout_s).tolist()
        self._next_vote, self._in_vain = int(expected), self._in_vain + 1 if busy else 0
        if busy:
            return
        if not last:
            self._take_turns(self._turns[1:])
            return
        self._end_round([tuple(slowest[i : i + len(parts)]) for i in range(0, len(slowest), len(parts))])
        if self.settled and comm.group_rank(group) == 0:
            say_once(f"measured {self._table(slowest)}; from now on {_text(self.plan)}")

    def _end_round(self, slowest: list[tuple[float, float]]) -> None:
        """Begin the next round, with the plans that are about as fast as the fastest; or choose.

        slowest: seconds of every plan's passes, on the slowest rank.
        """
        best = min(range(len(slowest)), key=lambda i: sum(slowest[i]))
        fast = [i for i, seconds in enumerate(slowest) if sum(seconds) <= SLOW * sum(slowest[best])]
        self._round += 1
        if self._round < ROUNDS and len(fast) > 1:
            self._take_turns(fast)
            return
        self.plan, self.settled, self._times = self.tried[best], True, []
        if isinstance(self.plan, TrainingPlan):  # a backward uses what its forward has exchanged
            heads = self.plan.forward.arrangement.heads
            fitting = [i for i, plan in enumerate(self.tried) if plan.forward.arrangement.heads == heads]
            forward, backward = (self.tried[min(fitting, key=lambda i: slowest[i][x])] for x in (FORWARD, BACKWARD))
            self.plan = dataclasses.replace(self.plan, forward=forward.forward, backward=backward.backward)

    def _table(self, slowest: list[float]) -> str:
        """Every plan, with the slowest rank's seconds."""
        seconds = map(format_seconds, slowest)
        return "; ".join(f"{_text(x)}: {' | '.join(next(seconds) for _ in passes_of(x))}" for x in self.tried)


Times = tuple[list, ...]  # of forward and backward: seconds, or a CUDA event before and one after; of one decode step


class Turn:
    """One call whose passes are measured."""

    def __init__(self, times: Times, open_: weakref.WeakSet):
        self._times, self._open = times, open_

    def timed(self, which: int, device: torch.device, run: Callable):
        """run(), and note how long it took. On a GPU the host does not wait."""
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = run()
            end.record()
            self.note(which, (begin, end))
        else:
            began = time.perf_counter()
            result = run()
            self.note(which, time.perf_counter() - began)
        if which == BACKWARD:
            self._open.discard(self)
        return result

    def note(self, which: int, time: float | tuple[torch.cuda.Event, torch.cuda.Event]) -> None:
        """Seconds that a pass took, or the events around it."""
        if len(self._times[which]) < MOST_SAMPLES:
            self._times[which].append(time)


def _text(plan: Plan) -> str:
    return " | ".join(map(str, passes_of(plan)))


def _median(turns: list[Times], which: int) -> float:
    """Seconds, without the first of every turn."""
    return statistics.median(_seconds(x) for times in turns for x in times[which][1:])


def _seconds(measured) -> float:
    if isinstance(measured, float):
        return measured
    begin, end = measured
    end.synchronize()
    return begin.elapsed_time(end) / 1000
