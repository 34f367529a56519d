"""Half an hour of training and generation on an emulated cluster; a rank is lost every few minutes.

The ranks run launch/train_gpt.py and launch/generate.py in turns. Every few minutes one rank is killed or stopped. The
others must end with an error that names it, and the ranks are restarted from the newest checkpoint, or from the answers
on disk. Work comes in rounds; one undisturbed round of each kind runs first, and every later loss and answer must equal
that of the undisturbed round. Memory, descriptors, threads and ports must not grow, and nothing may be left behind.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import pathlib
import random
import shutil
import signal
import tempfile
import time
import warnings

import torch
from tqdm import tqdm

from ...emulate import Cluster
from ...emulate.network import processes_in
from ...units import parse_bits_per_second, parse_count, parse_nodes_by_ranks, parse_seconds
from ..ranks import progress_bar
from ..results import WrongResult, metadata
from . import processes, report
from .checks import judge
from .incarnation import KillPlan, Run
from .records import Answer, Incarnation, Record
from .work import SCRIPTS, Generation, Options, Training, Work, answer

EVERY_STOP = 4  # every fourth loss is a SIGSTOP, the others are SIGKILLs
MOST_FAILURES = 3  # in a row that the soak did not cause
PRELOADED = (  # so that forked ranks start fast and share the memory
    "megatron_tree.training.loop",
    "megatron_tree.integrations.megatron",
    "megatron_tree.serving.generate",
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
    add("--nodes", type=parse_nodes_by_ranks, default="2x2", metavar="NxM", help="emulated nodes and ranks on each "
        "(default: %(default)s)")  # fmt: skip
    add("--latency", type=parse_seconds, default="1ms", help="between nodes (default: %(default)s)")
    add("--rate", type=parse_bits_per_second, default="1gbit", help="per node's port (default: %(default)s)")
    add("--only", choices=("train", "generate"), help="default: both, in turns")
    add("--steps", type=parse_count, default=1000, help="of training in a round (default: %(default)s)")
    add("--save-interval", type=parse_count, default=20, help="steps between checkpoints (default: %(default)s)")
    add("--requests", type=parse_count, default=400, help="prompts in a round (default: %(default)s)")
    add("--time-limit", type=parse_seconds, default="10s", help="of every wait for other ranks (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the data, the times and the ranks (default: %(default)s)")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench-results/soak"))


def run(args: argparse.Namespace) -> None:
    """Soak, check, print and write CSV, JSON and PNG.

    Raises: `WrongResult` if a check fails, after the files are written. ValueError, Unavailable.
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
        raise ValueError(f"--nodes {nodes}x{ranks_per_node}: at least two ranks are needed, one is lost")
    record = Record(limit_s=args.time_limit, save_interval=args.save_interval)
    signal.signal(signal.SIGTERM, _interrupt)
    new = not args.out.exists()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="soak-", dir=args.out) as folder:
            home = pathlib.Path(folder).resolve()
            _prepare_process(home, options.seed)
            with progress_bar(round(60 * args.minutes), "s") as bar:
                namespaces = _soak(args, options, record, home, bar)
        record.left = [*processes_in(namespaces), *processes.children(), *([str(home)] if home.exists() else [])]
    finally:
        if new and not any(args.out.iterdir()):
            args.out.rmdir()
    checks = judge(record)
    print(report.table(checks), flush=True)
    given = {name: value for name, value in vars(args).items() if name not in ("out", "command", "argv")}
    report.write(args.out, record, checks, metadata("soak", **given))
    if wrong := [c.name for c in checks if not c.ok]:
        raise WrongResult(f"{len(wrong)} of {len(checks)} checks failed: {'; '.join(wrong)}")


def _prepare_process(home: pathlib.Path, seed: int) -> None:
    """Set up what forked ranks inherit from this process."""
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TQDM_DISABLE="1")
    os.environ["TMPDIR"] = str(home)
    tempfile.tempdir = None
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):  # Megatron-core finds no Apex
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the ranks' collectors don't touch these objects, so their pages stay shared


def _soak(args, options: Options, record: Record, home: pathlib.Path, bar: tqdm) -> set[int]:
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

    def __init__(self, cluster: Cluster, record: Record, home: pathlib.Path, bar: tqdm):
        self._cluster, self._record, self._home, self._bar = cluster, record, home, bar
        self._began = time.monotonic()
        self._rounds: dict[str, int] = {}

    def reference(self, work: Work) -> None:
        """The undisturbed round. Raises: `WrongResult` if it fails."""
        self._rounds[work.name] = 0
        folder, record = self._folder(work), self._record
        done, _ = self._incarnate(work, None, "undisturbed ")
        if not done.finished:
            raise WrongResult(f"the undisturbed run of {work.name} failed: {done.failed}")
        record.losses |= {step: loss for _, step, loss in record.seen_losses}
        record.answers |= {found.id: found for found in _answers(work, folder)}
        record.seen_losses.clear()
        record.step_times.clear()
        self._close_round(work)

    def disturbed(self, works: list[Work], seconds: float, kill_every: float, rng: random.Random, ranks: int) -> None:
        """Rounds with losses of ranks for so many seconds; then finishes open rounds without losses."""
        plan, kills, failures, turn = _plan(rng, 1, kill_every, ranks), 0, 0, 0
        begun = time.monotonic()
        while (spent := time.monotonic() - begun) < seconds and failures < MOST_FAILURES:
            self._bar.n = round(spent)
            done, worked_s = self._next(works[turn % len(works)], plan, f"{kills} losses; ")
            turn += 1
            failures = failures + 1 if done.failed else 0
            if done.kill:
                kills += 1
                plan = _plan(rng, kills + 1, kill_every, ranks)
            else:
                plan = plan._replace(after_s=max(0.0, plan.after_s - worked_s))
        for work in works:
            if self._folder(work).exists() and failures < MOST_FAILURES:
                self._next(work, None, "finishing; ")

    def _next(self, work: Work, plan: KillPlan | None, what: str) -> tuple[Incarnation, float]:
        """One incarnation of the work's open round."""
        done, worked_s = self._incarnate(work, plan, what)
        folder = self._folder(work)
        if done.finished or (done.kill and work.saved(folder) == work.total):  # killed after its last result
            self._record.seen_answers += [(self._rounds[work.name], found) for found in _answers(work, folder)]
            self._close_round(work)
        return done, worked_s

    def _incarnate(self, work: Work, plan: KillPlan | None, what: str) -> tuple[Incarnation, float]:
        """Returns: (the incarnation, its seconds of work)."""
        folder = self._folder(work)
        folder.mkdir(exist_ok=True)
        run = Run(
            work, self._rounds[work.name], folder, self._record, began=self._began,
            show=lambda text: self._bar.set_description(what + text),
        )  # fmt: skip
        done = run.run(self._cluster, plan)
        self._bar.clear()
        print(report.line(report.summary(self._record, done)), *filter(None, [done.failed]), sep="\n", flush=True)
        return done, run.worked_s

    def _folder(self, work: Work) -> pathlib.Path:
        """Of the work's open round; it exists once the round has begun."""
        return self._home / f"{work.name}-{self._rounds[work.name]}"

    def _close_round(self, work: Work) -> None:
        shutil.rmtree(self._folder(work))
        self._rounds[work.name] += 1


def _answers(work: Work, folder: pathlib.Path) -> list[Answer]:
    return [answer(line) for line in work.results(folder, 0).lines() if "id" in line]


def _plan(rng: random.Random, number: int, kill_every: float, ranks: int) -> KillPlan:
    how = signal.SIGSTOP if number % EVERY_STOP == 0 else signal.SIGKILL
    return KillPlan(rng.randrange(ranks), how, kill_every * rng.uniform(0.5, 1.5))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
