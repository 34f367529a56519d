"""Plans by measurement: a kind of call tries its candidates once, aside, and keeps the fastest.

As cudnn.benchmark does it: candidates run one after another, on the call's tensors, outside the user's autograd, their
results are dropped, and all ranks take what was fastest on the slowest rank. A kind of call that goes backward does so
before its first call has a plan. Its plan never changes, so activation checkpointing, which runs a forward again in
the middle of a backward, finds the tensors of the first time. Other calls leave nothing behind, so they are measured
once they have been repeated.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from .. import comm
from ..comm.group import GroupState
from ..log import say_once
from ..plan import Topology, TrainingPlan
from ..plan.choice import Plan, alternatives, passes_of
from ..units import format_seconds

REPEATED = 8  # calls without a backward, and one for every rank, as plans for many take longer to make
SLOW = 1.5  # times the fastest: slower plans run twice only
SAMPLES = 4  # further runs of the others,
BUDGET_S = 2.0  # or as many as take so long
GAIN = 0.03  # by which another plan must be faster than the planner's
KINDS_MEASURED = 32

Run = Callable[[Plan, "Stopwatch"], None]


class Stopwatch:
    """Times the passes of a run. On a GPU the host waits when it reads the seconds only."""

    def __init__(self, device_type: str):
        self._is_cuda = device_type == "cuda"
        self._passes: list = []

    def timed(self, run: Callable):
        """run(), one pass."""
        if not self._is_cuda:
            began = time.perf_counter()
            result = run()
            self._passes.append(time.perf_counter() - began)
            return result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = run()
        end.record()
        self._passes.append((begin, end))
        return result

    @property
    def seconds(self) -> list[float]:
        """Of each pass."""
        if not self._is_cuda:
            return self._passes
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in self._passes]


def tuned_plan(
    ranks: comm.Ranks,
    kind: tuple,
    plan_on: Callable[..., Plan],
    topology: Topology,
    run: Run,
    *,
    backward: bool = False,
) -> tuple[Plan, bool]:
    """The plan of a call of this kind, the same on all ranks, which have agreed on everything but run; and whether it
    is the plan of all later calls. Collective.

    plan_on: the planner's plan, of a topology. run: runs the passes of such a call once by a plan, a collective of its
        own. backward: whether that has a backward, too.
    """
    state = ranks.state
    if (plan := state.tuned.get(kind)) is not None:
        return plan, True
    first = plan_on(topology=topology)
    if len(state.tuned) >= KINDS_MEASURED:
        return first, True
    if not (backward or _is_repeated(state, kind)):
        return first, False
    candidates = (first,)
    if not (ranks.device_type == "cuda" and torch.cuda.is_current_stream_capturing()):
        candidates = alternatives(plan_on, topology, backward=backward)
    plan = first if len(candidates) == 1 else _fastest(candidates, run, ranks)
    state.tuned[kind] = plan
    return plan, True


def _is_repeated(state: GroupState, kind: tuple) -> bool:
    """Count a call."""
    counts = state.counted
    counts[kind] = counts.get(kind, 0) + 1
    return counts[kind] > REPEATED + state.size


def _fastest(candidates: tuple[Plan, ...], run: Run, ranks: comm.Ranks) -> Plan:
    """The plan that takes the slowest rank the least time, by runs of all candidates in turns."""
    times: list[list[list[float]]] = [[] for _ in candidates]  # of a candidate: seconds of its passes, for every run

    def run_all(which: Iterable[int]) -> None:
        for i in which:
            watch = Stopwatch(ranks.device_type)
            run(candidates[i], watch)
            times[i].append(watch.seconds)

    def slowest() -> list[list[float]]:
        """Median seconds of every candidate's passes, on the slowest rank."""
        mine = [[statistics.median(x) for x in zip(*runs)] for runs in times]
        seconds = torch.tensor(mine, dtype=torch.float64, device=ranks.device)
        return ranks.reduce(seconds, "max").tolist()

    everyone = range(len(candidates))
    with torch.no_grad():
        run_all(everyone)
        times = [[] for _ in candidates]  # the first run makes groups and buffers
        run_all(everyone)
        seconds = slowest()
        best = min(map(sum, seconds))
        fast = [i for i in everyone if sum(seconds[i]) <= SLOW * best]
        if (count := min(SAMPLES, int(BUDGET_S / sum(sum(seconds[i]) for i in fast)))) and len(fast) > 1:
            for _ in range(count):
                run_all(fast)
            seconds = slowest()
    plan = _choice(candidates, seconds)
    if ranks.rank == 0:
        for i, (candidate, of_passes) in enumerate(zip(candidates, seconds)):
            for (name, of_pass), taken in zip(_named_passes(candidate), of_passes):
                text = f"a layer's {name}, measured: {format_seconds(taken)} by {of_pass}"
                say_once(text, about=f"measured {i} {name} {seconds}")
        for name, of_pass in _named_passes(plan)[: len(seconds[0])]:
            say_once(f"from now on {name} by {of_pass}", about=f"from now on {name} {seconds}")
    return plan


def _choice(candidates: tuple[Plan, ...], seconds: list[list[float]]) -> Plan:
    """The fastest plan; of training, the fastest passes that exchange heads alike: a backward uses what its forward has
    exchanged."""

    def faster(than: int, among: Iterable[int], cost: Callable[[int], float]) -> int:
        found = min(among, key=cost)
        return found if cost(found) < (1 - GAIN) * cost(than) else than

    at = faster(0, range(len(candidates)), lambda i: sum(seconds[i]))  # the first one is the planner's own
    plan = candidates[at]
    if not isinstance(plan, TrainingPlan):
        return plan
    heads = plan.forward.arrangement.heads
    fitting = [i for i, other in enumerate(candidates) if other.forward.arrangement.heads == heads]
    best = [candidates[faster(at, fitting, lambda i, x=x: seconds[i][x])] for x in range(len(seconds[at]))]
    return dataclasses.replace(plan, forward=best[0].forward, backward=best[-1].backward)


def _named_passes(plan: Plan) -> list[tuple[str, object]]:
    """What is measured of a plan, in this order."""
    return list(zip(("forward", "backward") if isinstance(plan, TrainingPlan) else ("decoding",), passes_of(plan)))
