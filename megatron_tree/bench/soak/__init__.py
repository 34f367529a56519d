"""Training and generation for half an hour on an emulated cluster, with the loss of a rank every few minutes.

Ranks run launch/train_gpt.py and launch/generate.py in turns. Every few minutes one of them is killed or stopped; the
others must end with an error that names it, and everything starts again from the newest checkpoint, or from the answers
that are there. Work comes in rounds; one undisturbed round of each is run before, and every loss and every answer
must be those of that run. Memory, descriptors, threads and ports must not grow, and nothing may stay behind.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import pathlib
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings

import torch

from ...emulate import Cluster
from ...emulate.network import processes_in
from .. import runs
from ..ranks import CORES
from ..report import WrongResult
from . import processes, report
from .checks import judge
from .incarnation import Plan, incarnate
from .records import Incarnation, Record
from .work import SCRIPTS, Generation, Options, Training, Work, answer

EVERY_STOP = 4  # one loss in so many is a SIGSTOP, the others are SIGKILLs
MOST_FAILURES = 3  # in a row, without our doing
PRELOADED = (  # so that forked ranks start at once, and share it
    "megatron_tree.training.loop",
    "megatron_tree.integrations.megatron",
    "megatron_tree.serving.run",
    "matplotlib.pyplot",
)
EXAMPLES = """\
examples:
  python -m megatron_tree.bench soak                                            what docs/reliability.md shows
  python -m megatron_tree.bench soak --minutes 2 --kill-every 20 --steps 60 --requests 12
  python -m megatron_tree.bench soak --only generate --nodes 4x1 --latency 5ms --rate 100mbit
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench soak`."""
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="after the undisturbed rounds (default: %(default)g)")
    add("--kill-every", type=float, default=120.0, metavar="SECONDS", help="of work, on average (default: %(default)g)")
    add("--nodes", type=runs.nodes_by_ranks, default="2x2", metavar="NxM", help="emulated nodes and ranks on each "
        "(default: %(default)s)")  # fmt: skip
    add("--latency", type=runs.seconds, default="1ms", help="between nodes (default: %(default)s)")
    add("--rate", type=runs.bits_per_second, default="1gbit", help="per node's port (default: %(default)s)")
    add("--only", choices=("train", "generate"), help="default: both, in turns")
    add("--steps", type=runs.positive, default=1000, help="of training in a round (default: %(default)s)")
    add("--save-interval", type=runs.positive, default=20, help="steps between checkpoints (default: %(default)s)")
    add("--requests", type=runs.positive, default=400, help="prompts in a round (default: %(default)s)")
    add("--time-limit", type=runs.seconds, default="10s", help="of every wait for other ranks (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the data, the times and the ranks (default: %(default)s)")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench-results/soak"))


def run(args: argparse.Namespace) -> None:
    """Soak, check, print and write CSV, JSON and PNG.

    Raises: `WrongResult` where a check fails; the files are there then, too. ValueError, Unavailable.
    """
    for name in ("minutes", "kill_every"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name):g}: must be more than 0")
    if not (SCRIPTS / "train_gpt.py").is_file():
        raise ValueError(f"bench soak runs the scripts in {SCRIPTS}: start it in a checkout of the repository")
    Cluster.require()
    nodes, ranks_per_node = args.nodes
    options = Options(
        ranks=nodes * ranks_per_node, steps=args.steps, save_interval=args.save_interval, requests=args.requests,
        limit_s=args.time_limit, seed=args.seed,
    )  # fmt: skip
    if options.ranks < 2:
        raise ValueError(f"--nodes {nodes}x{ranks_per_node}: nobody survives the loss of the only rank")
    record = Record(limit_s=args.time_limit, save_interval=args.save_interval)
    bar = Bar()
    signal.signal(signal.SIGTERM, _interrupt)
    new = not args.out.exists()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="soak-", dir=args.out) as folder:
            home = pathlib.Path(folder).resolve()
            _prepare_process(home, options.seed)
            namespaces = _soak(args, options, record, home, bar)
        record.left = [*processes_in(namespaces), *processes.children(), *([str(home)] if home.exists() else [])]
    finally:
        bar.close()
        if new and not any(args.out.iterdir()):
            args.out.rmdir()
    checks = judge(record)
    print(report.table(checks), flush=True)
    about = {
        "command": "soak",
        **{name: value for name, value in vars(args).items() if name not in ("out", "command")},
        "machine": f"{platform.machine()}, {CORES} cores",
        "torch": torch.__version__,
    }
    report.write(args.out, record, checks, about)
    if wrong := [c.name for c in checks if not c.ok]:
        raise WrongResult(f"{len(wrong)} of {len(checks)} checks failed: {'; '.join(wrong)}")


def _prepare_process(home: pathlib.Path, seed: int) -> None:
    """What forked ranks take over from this process."""
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TQDM_DISABLE="1")
    os.environ["TMPDIR"] = str(home)
    tempfile.tempdir = None
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):  # that Megatron-core finds no Apex
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the ranks' collectors leave these objects alone, so that their pages stay shared


def _soak(args, options: Options, record: Record, home: pathlib.Path, bar: Bar) -> set[int]:
    """Undisturbed rounds, then disturbed ones. Returns: the nodes' namespaces."""
    works: list[Work] = [kind(home, options) for kind in (Training, Generation) if args.only in (None, kind.name)]
    for work in works:
        work.prepare()
    nodes, ranks_per_node = args.nodes
    network = dict(latency_s=args.latency, rate_bits=args.rate, lifetime_s=4 * 60 * args.minutes + 7200)
    with Cluster(nodes=nodes, ranks_per_node=ranks_per_node, **network) as cluster:
        soak = Soak(cluster, record, home, bar)
        for work in works:
            soak.reference(work)
        soak.disturbed(works, 60 * args.minutes, args.kill_every, random.Random(args.seed), options.ranks)
        return cluster.namespaces


class Soak:
    """Incarnations one after another."""

    def __init__(self, cluster: Cluster, record: Record, home: pathlib.Path, bar: Bar):
        self._cluster, self._record, self._home, self._bar = cluster, record, home, bar
        self._began = time.monotonic()
        self._rounds: dict[str, int] = {}

    def reference(self, work: Work) -> None:
        """The undisturbed round. Raises: RuntimeError if it fails."""
        folder = self._home / f"{work.name}-0"
        done, _ = self._incarnate(work, 0, folder, None, "undisturbed ")
        if not done.finished:
            raise WrongResult(f"the undisturbed run of {work.name} failed: {done.failed}")
        record = self._record
        record.losses |= {step: loss for _, step, loss in record.seen_losses}
        record.answers |= {found.id: found for found in self._answers(work, folder)}
        record.seen_losses.clear()
        record.step_times.clear()
        shutil.rmtree(folder)
        self._rounds[work.name] = 1

    def disturbed(self, works: list[Work], seconds: float, kill_every: float, rng: random.Random, ranks: int) -> None:
        """Rounds with losses for so many seconds; those that are open then are finished without."""
        plan, kills, failures, turn = _plan(rng, 1, kill_every, ranks), 0, 0, 0
        begun, opened = time.monotonic(), set()
        while (spent := time.monotonic() - begun) < seconds and failures < MOST_FAILURES:
            work, turn = works[turn % len(works)], turn + 1
            opened.add(work.name)
            done, worked_s = self._next(work, plan, f"{spent / seconds:4.0%}, {kills} losses; ")
            failures = failures + 1 if done.failed else 0
            if done.kill:
                kills += 1
                plan = _plan(rng, kills + 1, kill_every, ranks)
            else:
                plan = plan._replace(after_s=max(0.0, plan.after_s - worked_s))
            if not (self._home / f"{work.name}-{self._rounds[work.name]}").exists():
                opened.discard(work.name)
        for work in works:
            if work.name in opened and failures < MOST_FAILURES:
                self._next(work, None, "finishing; ")

    def _next(self, work: Work, plan: Plan | None, what: str) -> tuple[Incarnation, float]:
        """One incarnation of the work's open round."""
        number = self._rounds[work.name]
        folder = self._home / f"{work.name}-{number}"
        done, worked_s = self._incarnate(work, number, folder, plan, what)
        if done.finished or (done.kill and work.saved(folder) == work.total):  # all is done, the rest was farewells
            self._record.seen_answers += [(number, found) for found in self._answers(work, folder)]
            shutil.rmtree(folder)
            self._rounds[work.name] += 1
        return done, worked_s

    def _incarnate(self, work, number, folder, plan, what) -> tuple[Incarnation, float]:
        folder.mkdir(exist_ok=True)
        found = incarnate(
            self._cluster, work, number, folder, plan, self._record, began=self._began,
            tell=lambda text: self._bar.say(what + text),
        )  # fmt: skip
        self._bar.line(report.line(report.row(self._record, found[0])))
        if found[0].failed:
            self._bar.line(found[0].failed)
        return found

    def _answers(self, work: Work, folder: pathlib.Path) -> list:
        return [answer(line) for line in work.results(folder, 0).lines() if "id" in line]


def _plan(rng: random.Random, number: int, kill_every: float, ranks: int) -> Plan:
    how = signal.SIGSTOP if number % EVERY_STOP == 0 else signal.SIGKILL
    return Plan(rng.randrange(ranks), how, kill_every * rng.uniform(0.5, 1.5))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class Bar:
    """What is going on: a line written anew on a terminal, and lines that stay."""

    def __init__(self):
        self._terminal, self._shown = sys.stderr.isatty(), 0.0

    def say(self, text: str) -> None:
        if self._terminal and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    def line(self, text: str) -> None:
        self.close()
        print(text, flush=True)

    def close(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
