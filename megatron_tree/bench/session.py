"""Cases on real ranks: machines are calibrated and started, contenders checked, timed, printed and written."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..calibrate import calibrate
from ..plan import Topology, save_topology
from .accelerator import Speed
from .measure import CORES, Measured, Meeting, Timing, join, take_turns
from .measurements import Measurement, measurements, plots, table_of, with_ratios
from .results import Results, WrongResult, metadata, progress_bar
from .runs import Case, Machines, Settings, cases, settings

ALLOWED = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest relative error of a row against float64: two units in the last place; in fp32, sums over long rows."""
CALIBRATION_S = 300.0
LIMIT_S = 3600.0  # of one case: a ring over a slow network is slow
RANKS_OF_A_CORE = 2  # with more, undilated steps wait for cores: predictions were 34 to 110 % of what was measured


def run_cases(
    args, about: dict, how: Settings, cases: list, run_case: Callable, checked: str, *, calibrate: bool = True
) -> None:
    """Run all cases of a command on their machines, print their tables and write the results.

    run_case(case, ranks, topology, path) -> rows; `ranks` is where to `run` functions, `path` the topology's file.
    calibrate: whether to make them; without, both are None.
    checked: how its results are verified, with {worst}, the largest error.
    """
    about = metadata(network=how.network_text, **about)
    print("\n".join(f"{name}: {text}" for name, text in about.items()), flush=True)
    results = Results(args.out, about)
    with progress_bar(len(cases), "case") as bar:
        for machines, group in itertools.groupby(cases, key=lambda case: case.machines):
            group = list(group)
            with _started(machines, how, len(group) * LIMIT_S, calibrate) as (ranks, topology, path):
                for case in group:
                    bar.set_description(case.label)
                    rows = with_ratios(run_case(case, ranks, topology, path))
                    results.add(*rows)
                    bar.update()
                    bar.clear()
                    worst = max(r.error for r in rows if r.error is not None)
                    print(table_of(case.label, checked.format(worst=f"{worst:.2g}"), rows), flush=True)
    results.finish(plots(results.rows), ", ".join(about[x] for x in ("command", "compute", "network")))


@contextlib.contextmanager
def _started(machines: Machines, how: Settings, lifetime_s: float, calibrate: bool) -> Iterator[tuple]:
    """Calibrate, if wanted, and start machines: (ranks, their topology, the path of its YAML file)."""
    if not calibrate:
        with how.start(machines, lifetime_s) as ranks:
            yield ranks, None, None
        return
    topology = calibrated(machines, how)
    links = (f"{x.name} {x.latency_s * 1e6:.0f} us, {x.port_bandwidth / 1e6:.4g} MB/s" for x in topology.levels)
    print(f"\ncalibrated {topology.name}: {'; '.join(links)}; transport {topology.transport}", flush=True)
    with how.start(machines, lifetime_s) as ranks, tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "topology.yaml")
        save_topology(topology, path)
        yield ranks, topology, path


def calibrated(machines: Machines, how: Settings) -> Topology:
    """The result of `megatron-tree calibrate` on these machines, its network level slowed by `dilate`.

    It runs undilated: on 16 ranks a slow network would take minutes.
    """
    with how._replace(dilate=1.0).start(machines, CALIBRATION_S + 30.0) as ranks:
        topology = ranks.run(calibrate_on_rank, how, machines.label, timeout_s=CALIBRATION_S)[0]
    if machines.nodes == 1:
        return topology
    *inside, network = topology.levels
    slower = replace(
        network,
        latency_s=network.latency_s + (how.dilate - 1) * how.latency_s,
        bandwidth=network.bandwidth / how.dilate,
        port_bandwidth=network.port_bandwidth / how.dilate,
    )
    if not inside:  # at the innermost level a port belongs to one rank
        slower = replace(slower, port_bandwidth=slower.bandwidth)
    return replace(topology, levels=(*inside, slower))


def calibrate_on_rank(how: Settings, name: str) -> Topology:
    """One rank's part of the calibration; the speed of a modelled accelerator is given, not measured."""
    join(timeout_s=CALIBRATION_S)
    speed = how.speed if how.compute == "modelled" else Speed(None, None)
    return calibrate(torch.device("cpu"), name=name, **speed._asdict()).topology


def run(args, command: str, bench) -> None:
    """Run all cases of a command line with `bench`, a class like `decode.DecodeBench`.

    Raises: ValueError for contradictory options. WrongResult, Unavailable, RuntimeError.
    """
    how, todo = settings(args), cases(args)
    how = how._replace(schedules=_schedules(how, bench))
    checked = "every schedule's result was checked on all ranks: worst error {worst} of what is allowed"
    about = dict(command=command, compute=how.compute_text)
    run_cases(args, about, how, todo, functools.partial(_run_case, how, bench), checked)


def _schedules(how: Settings, bench) -> tuple[str, ...]:
    """Those asked for, or all that can run here; says which rivals can't."""
    if others := set(how.schedules) - {*bench.ours, *bench.rivals}:
        names = " ".join((*bench.ours, *bench.rivals))
        raise ValueError(f"--schedules {' '.join(sorted(others))}: no contender in this pass: choose from {names}")
    why = bench.missing()
    if named := bench.rivals.keys() & set(how.schedules):
        if how.compute == "modelled":
            why = "only our own kernels can be modelled; add --compute real"
        if why:
            raise ValueError(f"--schedules {' '.join(named)}: {why}")
    if how.schedules or how.compute == "modelled":
        return how.schedules or bench.ours
    if why:
        print(f"{' and '.join(bench.rivals)} are left out: {why}")
        return bench.ours
    return (*bench.ours, *bench.rivals)


def _run_case(how: Settings, bench, case: Case, ranks, topology: Topology, path: str) -> list[Measurement]:
    """All contenders of one case. Raises `WrongResult` if the result of one of them was wrong."""
    names = [name for name in how.schedules if bench.applies(case, name)]
    meeting, shared = Meeting(case.machines.ranks), bench.shared(case)
    by_rank = ranks.run(_on_rank, case, how, bench, names, path, meeting, shared, timeout_s=LIMIT_S)
    local_s, errors, _ = by_rank[0]
    for name, error in zip(names, errors):
        if not error <= 1:
            differ = " (ranks differ in their results)" * (error == math.inf)
            raise WrongResult(f"{name} is wrong on {case.label}: {error:.3g} times the error that is allowed{differ}")
    given = {**case._asdict(), "machines": case.machines.label, "ranks": case.machines.ranks}
    base, rows = Measurement(**given, compute=how.compute, dilate=how.dilate), []
    for name, error, *measured in zip(names, errors, *(of_rank for *_, of_rank in by_rank)):
        if not all(rank.same for rank in measured):
            raise WrongResult(f"{name} on {case.label}: a timed step gave another result than the checked one")
        predicted = bench.predict(case, topology, name) if name in bench.ours else {}
        passes = measurements(base._replace(schedule=name), measured, predicted, case.machines, how.dilate)
        if how.dilate == 1 and case.machines.ranks > RANKS_OF_A_CORE * CORES:
            passes = [row._replace(predicted_ms=None) for row in passes]
        if name not in bench.ours:  # what others send is not logged; a node's counter sees it
            passes = [row._replace(sent_bytes=None) for row in passes]
        rows += [*passes[:-1], passes[-1]._replace(held_bytes=bench.held_bytes(case), error=error)]
    for name, seconds in bench.limits(case, how, local_s / how.dilate).items():
        rows.append(base._replace(schedule=name, part="limit", ms=seconds * 1e3))
    return rows


def _on_rank(case, how: Settings, bench, names, path, meeting, shared) -> tuple[float, list[float], list[Measured]]:
    """One rank's part of a case: (seconds of local compute alone, errors up to the first wrong one, measurements).

    No contender is timed if one of them is wrong.
    """
    group = join(timeout_s=600.0)
    rank = torch.distributed.get_rank(group)
    inputs = bench(case, how, path, group, meeting, shared)
    local_s, errors, timings = inputs.local_seconds(), [], []
    for name in names:
        timings.append(Timing(functools.partial(inputs.step, name), rank, meeting, how, case.machines.emulated))
        errors.append(inputs.error(timings[-1].results, name))
        if not errors[-1] <= 1:
            return local_s, errors, []
    take_turns(timings)
    meeting.meet(rank)
    return local_s, errors, [timing.measured() for timing in timings]
