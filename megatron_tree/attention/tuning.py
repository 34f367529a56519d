"""Training calls that measure their plans: a call that is repeated tries a few of them in turns, and keeps the fastest.

Every plan gives the exact result, so a turn costs nothing but the time by which its plan is slower. Every rank times
its passes. When all turns have gone forward and backward, the ranks compare the slowest rank's medians, once, and all
take the same plan from then on. Turns are counted, and calls come in the same order on every rank, so no rank needs to
ask whose turn it is.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import comm
from ..comm.group import GroupState
from ..log import say_once
from ..plan import Topology, TrainingPlan
from ..plan.alternatives import alternatives
from ..units import format_seconds

CALLS_BEFORE = 2  # that only what is repeated comes to
TURNS = 4  # of every plan; the first one is not counted: it makes groups and buffers
PATIENCE = 4  # times the turns: calls after which those that have not gone backward are not waited for any more
KINDS_OF_CALLS = 256  # of which a group keeps what it found out
FORWARD, BACKWARD = 0, 1


class Tuning:
    """What is known of one kind of call in one group."""

    def __init__(self, planned: TrainingPlan, plan_on: Callable[[Topology], TrainingPlan], topology: Topology):
        self.planned = planned
        self.chosen: TrainingPlan | None = None
        self._calls = 0
        self._plan_on, self._topology = plan_on, topology
        self._plans: tuple[TrainingPlan, ...] = ()
        self._measured: list[tuple[list, list]] = []

    @classmethod
    def of(cls, group, planned: TrainingPlan, plan_on, topology: Topology) -> Tuning:
        """The group's tuning of calls with this plan."""
        known = GroupState.of(group).tunings
        if id(planned) not in known:  # a Tuning holds its plan, so that the number stays the plan's
            if len(known) >= KINDS_OF_CALLS:
                known.pop(next(iter(known)))
            known[id(planned)] = cls(planned, plan_on, topology)
        return known[id(planned)]

    def next_turn(self, group, device: torch.device, timeout_s: float) -> tuple[TrainingPlan, Turn | None]:
        """The plan of a call that goes backward, and its turn if it is to be measured. Once, a collective."""
        if self.chosen is not None:
            return self.chosen, None
        self._calls += 1
        turn = self._calls - 1 - CALLS_BEFORE
        if turn < 0:
            return self.planned, None
        if not self._plans:
            self._plans = alternatives(self._plan_on, self._topology)
            self._measured = [([], []) for _ in self._plans]
            if len(self._plans) == 1:
                self.chosen = self.planned
                return self.chosen, None
        if turn < TURNS * len(self._plans):
            index = turn % len(self._plans)
            return self._plans[index], Turn(self, index, group, timeout_s)
        backwards = [len(backward) for _, backward in self._measured]
        if min(backwards) >= TURNS or turn > PATIENCE * TURNS * len(self._plans):
            self._choose(group, device, timeout_s)
        return self.chosen or self.planned, None

    def measured(self, index: int, which: int, seconds) -> None:
        self._measured[index][which].append(seconds)

    def _choose(self, group, device: torch.device, timeout_s: float) -> None:
        """Take the forward and the backward that were fastest on the slowest rank, among those that go together."""
        medians = [[_median(x) for x in of_plan] for of_plan in self._measured]
        slowest = comm.all_reduce(torch.tensor(medians, device=device), group, op="max", timeout_s=timeout_s).tolist()
        best = min(range(len(slowest)), key=lambda i: sum(slowest[i]))
        heads = self._plans[best].forward.arrangement.heads  # a backward uses what its forward has exchanged
        fitting = [i for i, plan in enumerate(self._plans) if plan.forward.arrangement.heads == heads]
        forward, backward = (min(fitting, key=lambda i: slowest[i][which]) for which in (FORWARD, BACKWARD))
        if sum(slowest[best]) == float("inf"):  # calls did not go backward
            forward = backward = 0
        self.chosen = dataclasses.replace(
            self.planned, forward=self._plans[forward].forward, backward=self._plans[backward].backward
        )
        if comm.group_rank(group) == 0:
            say_once(f"measured {self._table(slowest)}; from now on {self.chosen.forward} | {self.chosen.backward}")

    def _table(self, slowest: list[list[float]]) -> str:
        """Both passes of every plan, with the slowest rank's seconds."""
        lines = (
            f"{plan.forward} | {plan.backward}: {' | '.join(map(format_seconds, seconds))}"
            for plan, seconds in zip(self._plans, slowest)
        )
        return "; ".join(lines)


class Turn(NamedTuple):
    """One call whose passes are measured."""

    tuning: Tuning
    index: int
    group: object
    timeout_s: float

    def timed(self, which: int, device: torch.device, run: Callable):
        """run(), and note how long it took. On a CPU ranks begin together; on a GPU the host does not wait."""
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = run()
            end.record()
            self.tuning.measured(self.index, which, (begin, end))
            return result
        comm.all_reduce(torch.zeros(1), self.group, timeout_s=self.timeout_s)
        began = time.perf_counter()
        result = run()
        self.tuning.measured(self.index, which, time.perf_counter() - began)
        return result


def _median(times: list) -> float:
    """Seconds, without the first; infinite if there are none."""
    if len(times) < 2:
        return float("inf")
    return statistics.median(_seconds(x) for x in times[1:])


def _seconds(measured) -> float:
    if isinstance(measured, float):
        return measured
    begin, end = measured
    end.synchronize()
    return begin.elapsed_time(end) / 1000
