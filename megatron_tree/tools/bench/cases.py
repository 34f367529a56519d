"""The cases of a benchmark on several ranks: its options, the machines that are started and calibrated, and the run of
each case: contenders are checked, timed, printed and written."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch

from ...core import comm
from ...core.plan import Topology, save_topology
from ...core.spec import AttnSpec
from ..calibrate.cluster import calibrate
from ..calibrate.kernel_cases import DTYPES, WrongResult
from ..emulate import Cluster
from ..emulate.forked import LocalRanks
from .results import Measurement, Results, measurements, metadata, plots, progress_bar, table_of, with_ratios
from .timing import ACCELERATOR, CORES, Meeting, RankTimes, Speed, Timing, join, take_turns

ALLOWED = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest relative error of a row against float64: two units in the last place; in fp32, sums over long rows."""
CALIBRATION_S = 300.0
LIMIT_S = 3600.0  # of one case: a ring over a slow network is slow
RANKS_OF_A_CORE = 2  # with more, undilated steps wait for cores: predictions were 34 to 110 % of what was measured


class Machines(NamedTuple):
    """Where ranks run: an emulated cluster, or processes of this machine (one node, no network)."""

    nodes: int
    ranks_per_node: int
    emulated: bool = True

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def label(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}" if self.emulated else f"{self.ranks} local"

    @property
    def hosts(self) -> list[int]:
        """The node of each rank."""
        return [rank // self.ranks_per_node for rank in range(self.ranks)]


class Case(NamedTuple):
    """One set of inputs, the same for every schedule: a sequence [1, seq_len, heads, head_dim]."""

    machines: Machines
    seq_len: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    dtype: str

    @property
    def label(self) -> str:
        heads = f"{self.num_heads}/{self.num_heads_kv} heads x {self.head_dim}"
        return f"{self.machines.label} ranks, {self.seq_len} tokens, {heads}, {self.dtype}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of one rank's share of keys and values."""
        tokens = self.seq_len // self.machines.ranks
        return 2 * tokens * self.num_heads_kv * self.head_dim * DTYPES[self.dtype].itemsize

    def measurement(self, **values) -> Measurement:
        """A row of results.csv about this case."""
        case = {**self._asdict(), "machines": self.machines.label, "ranks": self.machines.ranks}
        return Measurement(**case, **values)


class Settings(NamedTuple):
    """How all cases of one command are run. Times and rates are as the user specified them, before `dilate`."""

    schedules: tuple[str, ...]
    """Empty: all that can run."""
    emulated: bool
    latency_s: float
    rate_bits: float
    compute: str = "real"
    dilate: float = 1.0
    steps: int = 1
    budget_s: float = 1.0

    def start(self, machines: Machines, lifetime_s: float):
        """A context of ranks: an emulated cluster whose network is `dilate` times slower, or local ranks."""
        if not machines.emulated:
            return contextlib.nullcontext(LocalRanks(machines.ranks))
        return Cluster(
            nodes=machines.nodes,
            ranks_per_node=machines.ranks_per_node,
            latency_s=self.latency_s * self.dilate,
            rate_bits=self.rate_bits / self.dilate,
            lifetime_s=lifetime_s,
        )

    @property
    def network_text(self) -> str:
        """The network in words."""
        if not self.emulated:
            return "loopback of this machine"
        slow = f"; run {self.dilate:g} times slower, times divided by {self.dilate:g}" if self.dilate != 1 else ""
        return f"emulated, {self.latency_s * 1e3:g} ms and {self.rate_bits / 1e6:g} Mbit/s between nodes{slow}"

    @property
    def compute_text(self) -> str:
        """Whether kernels ran in the timed steps, in words."""
        if self.compute == "real":
            return "real"
        return f"modelled ({ACCELERATOR.memory_bandwidth / 1e9:g} GB/s of KV, {ACCELERATOR.flops / 1e12:g} TFLOP/s)"

    @property
    def speed(self) -> Speed:
        """The modelled accelerator's speed, divided by `dilate`."""
        return Speed(*(x / self.dilate for x in ACCELERATOR))


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings of a command line. Raises ``ValueError`` for invalid or contradictory values."""
    machines = machines_of(args)
    compute = args.compute or ("modelled" if max(m.ranks for m in machines) > CORES else "real")
    for name in ("dilate", "budget"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name} {getattr(args, name):g}: must be positive")
    if args.dilate != 1 and (compute == "real" or not args.emulate):
        raise ValueError(
            f"--dilate {args.dilate:g} slows down an emulated network and a modelled accelerator: it needs --emulate "
            "and --compute modelled"
        )
    network = bool(args.emulate), args.latency, args.rate
    return Settings(tuple(args.schedules or ()), *network, compute, args.dilate, args.steps, args.budget)


def machines_of(args) -> list[Machines]:
    """The machines of a command line. Raises ``ValueError`` for a single rank."""
    machines = [Machines(*pair) for pair in args.emulate or ()] or [Machines(1, args.ranks, emulated=False)]
    for one in machines:
        if one.ranks < 2:
            raise ValueError(f"{one.label} rank: start at least two, to measure communication")
    return machines


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The cases of a command line, by machines. Raises ``ValueError`` for sizes that do not divide evenly."""
    machines = machines_of(args)
    for one, s in itertools.product(machines, args.seq_len):
        if s % (2 * one.ranks):
            raise ValueError(f"--seq-len {s}: must be a multiple of 2 x {one.ranks} ranks, for equal shares")
    if uneven := [n for n in args.kv_heads if args.heads % n]:
        raise ValueError(f"--kv-heads {uneven[0]}: must divide --heads {args.heads}")
    each = itertools.product(machines, args.seq_len, args.kv_heads)
    return [Case(m, s, args.heads, h_kv, args.head_dim, args.dtype) for m, s, h_kv in each]


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
    topology = calibrated(machines, how) if calibrate else None
    with how.start(machines, lifetime_s) as ranks, tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "topology.yaml") if calibrate else None
        if calibrate:
            save_topology(topology, path)
        yield ranks, topology, path


def calibrated(machines: Machines, how: Settings) -> Topology:
    """The result of `megatron-tree calibrate` on these machines, its network level slowed by `dilate`; prints it.

    It runs undilated: on 16 ranks a slow network would take minutes.
    """
    with how._replace(dilate=1.0).start(machines, CALIBRATION_S + 30.0) as ranks:
        topology = ranks.run(calibrate_on_rank, how, machines.label, timeout_s=CALIBRATION_S)[0]
    if machines.nodes > 1:
        *inside, network = topology.levels
        slower = replace(
            network,
            latency_s=network.latency_s + (how.dilate - 1) * how.latency_s,
            bandwidth=network.bandwidth / how.dilate,
            port_bandwidth=network.port_bandwidth / how.dilate,
        )
        if not inside:  # at the innermost level a port belongs to one rank
            slower = replace(slower, port_bandwidth=slower.bandwidth)
        topology = replace(topology, levels=(*inside, slower))
    links = (f"{x.name} {x.latency_s * 1e6:.0f} us, {x.port_bandwidth / 1e6:.4g} MB/s" for x in topology.levels)
    print(f"\ncalibrated {topology.name}: {'; '.join(links)}; transport {topology.transport}", flush=True)
    return topology


def calibrate_on_rank(how: Settings, name: str) -> Topology:
    """One rank's part of the calibration; the speed of a modelled accelerator is given, not measured."""
    join(timeout_s=CALIBRATION_S)
    speed = how.speed if how.compute == "modelled" else Speed(None, None)
    return calibrate(torch.device("cpu"), name=name, **speed._asdict()).topology


class Bench:
    """What is measured in one case, on one rank: a step of each contender on this rank's share of the inputs.

    Subclasses have step(contender, laps) -> results; error(results, contender), the worst on any rank as a fraction of
    what is allowed; local_seconds(), a rank's compute alone; and of a case held_bytes(case), what a rank holds before a
    step; predict(case, topology, contender), {pass: plan}; limits(case, how, local_s), {name: seconds} of lower bounds.
    """

    ours: tuple[str, ...] = ()
    rivals: ClassVar[dict[str, Callable]] = {}

    def __init__(self, case: Case, how: Settings, group, meeting: Meeting):
        self.case, self.how, self.group, self.meeting = case, how, group, meeting
        self.rank, self.dtype = comm.group_rank(group), DTYPES[case.dtype]
        self.spec, self.allowed = AttnSpec(softmax_scale=case.head_dim**-0.5), ALLOWED[self.dtype]

    @staticmethod
    def shared(case: Case):
        """What all ranks of a case share, made before they are forked."""

    @staticmethod
    def missing() -> str | None:
        """Why the rivals can't run here."""

    @staticmethod
    def applies(case: Case, contender: str) -> bool:
        """Whether a contender can take a case."""
        return True


def run(args, command: str, bench: type[Bench]) -> None:
    """Run all cases of a command line.

    Raises: ValueError for contradictory options. WrongResult, Unavailable, RuntimeError.
    """
    how, cases = settings_of(args), cases_of(args)
    how = how._replace(schedules=_schedules(how, bench))
    checked = "every schedule's result was checked on all ranks: worst error {worst} of what is allowed"
    about = dict(command=command, compute=how.compute_text)
    run_cases(args, about, how, cases, functools.partial(_run_case, how, bench), checked)


def _schedules(how: Settings, bench: type[Bench]) -> tuple[str, ...]:
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


def _run_case(how: Settings, bench: type[Bench], case: Case, ranks, topology: Topology, path: str) -> list[Measurement]:
    """All contenders of one case. Raises `WrongResult` if the result of one of them was wrong."""
    names = [name for name in how.schedules if bench.applies(case, name)]
    meeting, shared = Meeting(case.machines.ranks), bench.shared(case)
    by_rank = ranks.run(_on_rank, case, how, bench, names, path, meeting, shared, timeout_s=LIMIT_S)
    local_s, errors, _ = by_rank[0]
    for name, error in zip(names, errors):
        if not error <= 1:
            differ = " (ranks differ in their results)" * (error == math.inf)
            raise WrongResult(f"{name} is wrong on {case.label}: {error:.3g} times the error that is allowed{differ}")
    base, rows = case.measurement(compute=how.compute, dilate=how.dilate), []
    for name, error, *measured in zip(names, errors, *(of_rank for *_, of_rank in by_rank)):
        if not all(rank.same for rank in measured):
            raise WrongResult(f"{name} on {case.label}: a timed step gave another result than the checked one")
        predicted = bench.predict(case, topology, name) if name in bench.ours else {}
        ranks_per_node = case.machines.ranks_per_node
        passes = measurements(base._replace(schedule=name), measured, predicted, ranks_per_node, how.dilate)
        if how.dilate == 1 and case.machines.ranks > RANKS_OF_A_CORE * CORES:
            passes = [row._replace(predicted_ms=None) for row in passes]
        if name not in bench.ours:  # what others send is not logged; a node's counter sees it
            passes = [row._replace(sent_bytes=None) for row in passes]
        rows += [*passes[:-1], passes[-1]._replace(held_bytes=bench.held_bytes(case), error=error)]
    for name, seconds in bench.limits(case, how, local_s / how.dilate).items():
        rows.append(base._replace(schedule=name, part="limit", ms=seconds * 1e3))
    return rows


def _on_rank(case, how: Settings, bench, names, path, meeting, shared) -> tuple[float, list[float], list[RankTimes]]:
    """One rank's part of a case: (seconds of local compute alone, errors up to the first wrong one, measurements).

    No contender is timed if one of them is wrong.
    """
    one = bench(case, how, join(timeout_s=600.0), meeting, path, shared)
    local_s, errors, timings = one.local_seconds(), [], []
    for name in names:
        timings.append(Timing(functools.partial(one.step, name), one.rank, meeting, how, case.machines.emulated))
        errors.append(one.error(timings[-1].results, name))
        if not errors[-1] <= 1:
            return local_s, errors, []
    take_turns(timings)
    meeting.meet(one.rank)
    return local_s, errors, [timing.measured() for timing in timings]
