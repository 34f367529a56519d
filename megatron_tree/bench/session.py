"""One command of `bench decode` or `bench train`: all its cases on real ranks, checked, timed, printed and written."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import torch
from tqdm import tqdm

from ..calibrate import calibrate
from ..emulate import network_bytes
from ..plan import Topology, save_topology
from .accelerator import Accelerator, Speed
from .measure import first_step, measure
from .measurements import Measurement, Outcome, measurement, measurements, plots, table_of
from .ranks import Meeting, join, progress_bar, shown_by
from .results import WrongResult, metadata, results_kept
from .runs import Case, Machines, Settings, cases, settings

ALLOWED = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest relative error of a row against float64: two units in the last place; in fp32, sums over long rows."""
CALIBRATION_S = 300.0
SETUP_S = 60.0  # for ranks to start and make their inputs


def run(args, command: str, lengths: tuple[int, ...], bench) -> None:
    """Run all cases of a command line with `bench`, a class like `decode.DecodeBench`, and write the results.

    Raises: ValueError for contradictory options. WrongResult, Unavailable, RuntimeError.
    """
    how, todo = settings(args), cases(args, lengths)
    about = describe_run(command, how, compute=how.compute_text)
    title = f"{command}, {how.network_text}, compute {how.compute}"
    with (
        results_kept(args.out, about, lambda rows: plots(rows, title)) as rows,
        progress_bar(len(todo) * len(how.schedules), "schedule") as bar,
    ):
        for machines, group in itertools.groupby(todo, key=lambda case: case.machines):
            group = list(group)
            lifetime_s = 60.0 + sum(time_limit(case, how) for case in group)
            with started(machines, how, lifetime_s, bar) as (ranks, topology, path):
                for case in group:
                    found = run_case(case, how, bench, ranks, topology, path, bar)
                    rows += found
                    bar.update(len(how.schedules))
                    bar.clear()
                    print(table_of(case, found), flush=True)


def describe_run(command: str, how: Settings, **more: str) -> dict[str, str]:
    """Metadata of a run for its files; also prints it."""
    about = metadata(command, network=how.network_text, **more)
    print("\n".join(f"{name}: {text}" for name, text in about.items()), flush=True)
    return about


@contextlib.contextmanager
def started(machines: Machines, how: Settings, lifetime_s: float, bar: tqdm) -> Iterator[tuple]:
    """Calibrate and start machines: (ranks, their topology, the path of its YAML file)."""
    bar.set_description(f"{machines.label}: calibrating")
    topology = calibrated(machines, how)
    bar.set_description(machines.label, refresh=False)
    bar.clear()
    links = (f"{x.name} {x.latency_s * 1e6:.0f} us, {x.port_bandwidth / 1e6:.4g} MB/s" for x in topology.levels)
    overhead = f"{topology.overhead_s * 1e6:.0f} us for one more message"
    print(f"\ncalibrated {topology.name}: {'; '.join(links)}; {overhead}; transport {topology.transport}", flush=True)
    with how.start(machines, lifetime_s) as ranks, tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "topology.yaml")
        save_topology(topology, path)
        yield ranks, topology, path


def time_limit(case: Case, how: Settings) -> float:
    """Time limit of a case in seconds: several times what it should take."""
    slow = case.kv_bytes * case.machines.ranks * 8 / (how.rate_bits / how.dilate) * 3  # a ring's forward and backward
    return SETUP_S + 600.0 + len(how.schedules) * (how.budget_s * 3 + 10 * slow)


def calibrated(machines: Machines, how: Settings) -> Topology:
    """The result of `python -m megatron_tree.calibrate` on these machines, its network level slowed by `dilate`."""
    with how._replace(dilate=1.0).start(machines, CALIBRATION_S + 30.0) as ranks:
        found = ranks.run(calibrate_on_rank, how, machines.label, timeout_s=CALIBRATION_S)[0]
    if machines.nodes == 1:
        return found
    *inside, network = found.levels
    slower = replace(
        network,
        latency_s=network.latency_s + (how.dilate - 1) * how.latency_s,
        bandwidth=network.bandwidth / how.dilate,
        port_bandwidth=network.port_bandwidth / how.dilate,
    )
    if not inside:  # at the innermost level a port belongs to one rank
        slower = replace(slower, port_bandwidth=slower.bandwidth)
    return replace(found, levels=(*inside, slower))


def calibrate_on_rank(how: Settings, name: str) -> Topology:
    """One rank's part of the calibration; the speed of a modelled accelerator is given, not measured."""
    join(timeout_s=CALIBRATION_S)
    speed = how.emulated_speed if how.compute == "modelled" else Speed(None, None)
    return calibrate(torch.device("cpu"), name=name, **speed._asdict()).topology


def run_case(case: Case, how: Settings, bench, ranks, topology: Topology, path: str, bar: tqdm) -> list[Measurement]:
    """All schedules of one case. Raises `WrongResult` if the result of one of them was wrong."""
    meeting = Meeting(case.machines.ranks)
    shared = bench.shared(case)
    by_rank = ranks.run(on_rank, case, how, bench, path, meeting, shared, bar, timeout_s=time_limit(case, how))
    local_s = by_rank[0][0]
    outcomes = [outcomes for _, outcomes in by_rank]
    last = outcomes[0][-1]
    if last.measured is None:
        raise WrongResult(
            f"{last.schedule} is wrong on {case.label}: {last.error:.3g} times the error that is allowed"
            + (" (ranks differ in their results)" if last.error == float("inf") else "")
        )
    if changed := [o.schedule for o in itertools.chain(*outcomes) if not o.measured.same]:
        raise WrongResult(f"{changed[0]} on {case.label}: a timed step gave another result than the checked one")
    hosts = [r // case.machines.ranks_per_node for r in range(case.machines.ranks)]
    rows = []
    for of_ranks in zip(*outcomes):
        predicted = bench.predict(case, topology, hosts, of_ranks[0].schedule)
        rows += measurements(case, how, of_ranks, predicted, bench.held_bytes(case))
    for name, limit_s in bench.limits(case, how, local_s / how.dilate).items():
        rows.append(measurement(case, how, schedule=name, part="limit", ms=limit_s * 1e3))
    return rows


def on_rank(case, how: Settings, bench, topology_path, meeting, shared, bar) -> tuple[float, list[Outcome]]:
    """One rank's part of a case: (seconds of local compute alone, outcomes up to the first wrong one)."""
    group = join(timeout_s=600.0)
    rank = torch.distributed.get_rank(group)
    show = shown_by(bar, rank)
    accelerator = Accelerator(how.emulated_speed) if how.compute == "modelled" else None
    show(f"{case.label}, inputs and oracle")
    inputs = bench(case, how, topology_path, group, meeting, shared)
    local_s = inputs.local_seconds()
    outcomes = []
    for number, schedule in enumerate(how.schedules):

        def step(laps, schedule=schedule):
            return inputs.step(schedule, laps)

        show(f"{case.label}, {schedule}: checking", number)
        results = first_step(step, accelerator)
        error = inputs.error(results)
        measured = None
        if error <= 1:
            measured = measure(
                step,
                results,
                rank=rank,
                meeting=meeting,
                accelerator=accelerator,
                counters=network_bytes if case.machines.emulated else None,
                steps=how.steps,
                budget_s=how.budget_s,
                latency_s=how.latency_s * how.dilate,
                progress=lambda n, schedule=schedule: show(f"{case.label}, {schedule}: step {n + 1}"),
            )
        outcomes.append(Outcome(schedule, error, measured))
        if measured is None:
            break
    meeting.meet(rank)
    return local_s, outcomes
