"""A Llama's training step over a sharded sequence: ours, DeepSpeed's Ulysses and torch's context parallelism in one
Transformers model, with the same weights, batches, average of gradients and AdamW. The first step's loss and gradients
are compared with one rank's, later losses and gradient norms with each other's, before any time is shown."""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import pathlib
import pstats
import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..comm.group import GroupState
from ..files import whole_file
from ..integrations.transformers import models
from ..units import parse_count
from . import runs, session
from .contenders import OURS, RIVALS, VOCAB, WRAPPERS, Contender, missing
from .kernel_cases import DTYPES
from .measure import Laps, Measured, Meeting, Timing, join, shared_tensor, take_turns
from .measurements import Measurement, measurements
from .results import WrongResult
from .runs import Case, Settings

ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative error of the first step's loss and gradients."""
LATER = 50.0  # of later steps' losses and gradient norms, by this factor: AdamW divides small gradients by themselves
EXAMPLES = """\
examples:
  megatron-tree bench step --ranks 2 --seq-len 1k
  megatron-tree bench step --emulate 4x1 --seq-len 2k 8k --kv-heads 8,2
  megatron-tree bench step --emulate 4x1 --seq-len 4k --heads 14 --kv-heads 14,2      DeepSpeed's heads are padded to 16
  megatron-tree bench step --emulate 4x1 --seq-len 4k --wrapper fsdp2
  megatron-tree bench step --emulate 4x1 --seq-len 2k --kv-heads 8 --schedules auto --profile
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser, "step", (*OURS, *RIVALS), modelled=False)
    add = parser.add_argument
    add("--layers", type=parse_count, default=2)
    add("--wrapper", choices=WRAPPERS, default="average", help="average: one all-reduce of all gradients (default); "
        "fsdp2: torch's fully_shard of every layer")  # fmt: skip
    add("--profile", action="store_true", help="of one contender: write what rank 0 does in five steps into "
        "profile.txt (calls and CPU time)")  # fmt: skip
    parser.set_defaults(heads=8, kv_heads="8,2", head_dim=64, dtype="fp32", seq_len=[2048])


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    how, todo, why = runs.settings(args), runs.cases(args), missing()
    if args.profile and len(how.schedules) != 1:
        raise ValueError("--profile needs one contender: name it with --schedules")
    for name, reason in why.items():
        if name in how.schedules:
            raise ValueError(f"--schedules {name}: {reason}")
        if not how.schedules:
            print(f"{name} is left out: {reason}")
    how = how._replace(schedules=how.schedules or tuple(x for x in (*OURS, *RIVALS) if x not in why))
    model = f"Llama, {args.layers} layers, random weights"
    about = dict(command="step", model=model, compute="real", wrapper=args.wrapper)
    checked = "losses and gradients of all steps agree: worst difference {worst} of what is allowed"
    session.run_cases(args, about, how, todo, functools.partial(_run_case, args, how), checked, calibrate=False)


class StepOutcome(NamedTuple):
    """One rank's outcome of one contender."""

    error: float
    """As a fraction of what is allowed; the same on all ranks."""
    plan: str | None
    """What was chosen by measuring, if anything."""
    measured: Measured | None
    """None if a contender was wrong."""


def _run_case(args, how: Settings, case: Case, ranks, *_) -> list[Measurement]:
    """Rows of all contenders. Raises `WrongResult` unless their losses and gradients are right."""
    shape = dict(heads=case.num_heads, kv_heads=case.num_heads_kv, head_dim=case.head_dim, layers=args.layers)
    width = case.num_heads * case.head_dim
    model = models.random_llama(**shape, positions=case.seq_len, hidden_size=width, vocab_size=VOCAB)
    model = model.to(DTYPES[case.dtype])
    names = [name for name in how.schedules if name != "ulysses" or case.machines.ranks <= case.num_heads]
    meeting = Meeting(case.machines.ranks, timeout_s=session.LIMIT_S)
    truth = shared_tensor((1 + sum(p.numel() for p in model.parameters()),), torch.float32)
    by_rank = ranks.run(_on_rank, args, how, case, model, names, meeting, truth, timeout_s=session.LIMIT_S)
    for name, one in zip(names, by_rank[0]):
        if not one.error <= 1:
            raise WrongResult(f"{name} is wrong on {case.label}: {one.error:.3g} times the error that is allowed")
    given = {**case._asdict(), "machines": case.machines.label, "ranks": case.machines.ranks}
    rows, first = [], _seconds_of_steps(by_rank, names.index("auto") if "auto" in names else 0)
    for number, (name, one) in enumerate(zip(names, by_rank[0])):
        base = Measurement(**given, model="Llama", compute="real", schedule=name)
        passes = measurements(base, [outcomes[number].measured for outcomes in by_rank], {}, case.machines)
        if name in RIVALS:  # what others send is not logged; a node's counter sees it
            passes = [row._replace(sent_bytes=None) for row in passes]
        turns = statistics.median(x / y for x, y in zip(_seconds_of_steps(by_rank, number), first))
        rows += [*passes[:-1], passes[-1]._replace(error=one.error, plan=one.plan, ratio=turns)]
    if "auto" in names:
        print(_beside(rows), flush=True)
    return rows


def _seconds_of_steps(by_rank: list[list[StepOutcome]], number: int) -> list[float]:
    """A contender's steps, of the slowest rank in each pass."""
    ranks = [outcomes[number].measured.seconds for outcomes in by_rank]
    passes = [map(max, zip(*(seconds[name] for seconds in ranks))) for name in ranks[0]]
    return [sum(times) for times in zip(*passes)]


def _beside(rows: list[Measurement]) -> str:
    """auto beside the best of the others, turn by turn."""
    ratios, said = {row.schedule: row.ratio for row in rows if row.part == "total"}, []
    for what, group in (("schedule", OURS), ("rival", RIVALS)):
        if others := {name: ratios[name] for name in group if name in ratios and name != "auto"}:
            best = min(others, key=others.get)
            said.append(f"auto / best {what} ({best}) {1 / others[best]:.3g}")
    return ", ".join(said)


def _on_rank(args, how, case: Case, model, names, meeting: Meeting, truth: Tensor) -> list[StepOutcome]:
    """One rank's part of a case. No contender is timed if one of them is wrong."""
    group = join(timeout_s=session.LIMIT_S)
    rank, generator = comm.group_rank(group), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (case.batch, case.seq_len), generator=generator)
    if rank == 0:
        plain = Contender("plain", model, tokens, case)
        plain.step(Laps([]))
        truth[0], truth[1:] = plain.losses[0], plain.gradient
    meeting.meet(rank)
    allowed, contenders, timings, errors = ALLOWED[model.dtype], [], [], []
    for name in names:
        one = Contender(name, model, tokens, case, group, args.wrapper)
        timings.append(Timing(one.step, rank, meeting, how, case.machines.emulated))
        loss, gradient = truth[0], truth[1:]
        local = max(abs(one.losses[0] / loss - 1), (one.gradient - gradient).norm() / gradient.norm())
        errors.append(meeting.most(rank, local / allowed)[0])
        contenders.append(one)
        if not errors[-1] <= 1:
            return [StepOutcome(error, None, None) for error in errors]
    for one in contenders:  # the first step was checked; this is the second one before those that are timed
        one.step(Laps([]))
    take_turns(timings)
    for i, one in enumerate(contenders):
        pairs = [*zip(one.losses, contenders[0].losses), *zip(one.norms, contenders[0].norms)]
        later = max(abs(x / y - 1) for x, y in pairs) / (LATER * allowed)
        errors[i] = meeting.most(rank, max(errors[i], later))[0]
    if args.profile:
        _profile(contenders[0], rank, args.out)
    meeting.meet(rank)
    plans = [_chosen(group) if name == "auto" else None for name in names]
    return list(map(StepOutcome, errors, plans, (timing.measured() for timing in timings)))


def _chosen(group) -> str | None:
    """The plans that were chosen in the group by measuring, if any were."""
    return "; ".join(f"{plan.forward} / {plan.backward}" for plan in GroupState.of(group).tuned.values()) or None


def _profile(one: Contender, rank: int, folder: pathlib.Path) -> None:
    """Five steps of a contender; rank 0 writes down what it did, and its main thread's CPU time."""
    profile = cProfile.Profile(time.thread_time)
    with profile if rank == 0 else contextlib.nullcontext():
        for _ in range(5):
            one.step(Laps([]))
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / "profile.txt") as part, part.open("w") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(80)
