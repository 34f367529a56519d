"""A Llama's training step over a sharded sequence: ours, DeepSpeed's Ulysses and torch's context parallelism in one
Transformers model, with the same weights, batches, average of gradients and AdamW. The first step's loss and gradients
are compared with one rank's, later losses and gradient norms with each other's, before any time is shown."""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import math
import pstats
import statistics

import torch
from torch import Tensor

from .. import comm
from ..comm.group import GroupState
from ..integrations.transformers import models
from ..units import parse_count
from . import runs, session
from .contenders import OURS, RIVALS, STARTS, Contender, missing
from .kernel_cases import DTYPES
from .measure import Laps, Measured, Meeting, Timing, join, shared_tensor, take_turns
from .measurements import Measurement, measurements
from .results import WrongResult
from .runs import Case

ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative error of the first step's loss and gradients."""
LATER = 50.0  # of later steps' losses and gradient norms, by this factor: AdamW divides small gradients by themselves
MOST_WARM_UP = 64  # steps
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
    add("--wrapper", choices=STARTS, default="average", help="average: of all gradients, in one all-reduce (default); "
        "fsdp2: torch's fully_shard of every layer")  # fmt: skip
    add("--profile", action="store_true", help="show where rank 0 spends its time (cProfile); not with several "
        "contenders")  # fmt: skip
    parser.set_defaults(heads=8, kv_heads="8,2", head_dim=64, dtype="fp32", seq_len=[2048])


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    how, todo = runs.settings(args), runs.cases(args)
    if args.profile and len(how.schedules) != 1:
        raise ValueError("--profile needs one contender: name it with --schedules")
    why = missing()
    for name in set(why) & set(how.schedules):
        raise ValueError(f"--schedules {name}: {why[name]}")
    for name, reason in why.items():
        if not how.schedules:
            print(f"{name} is left out: {reason}")
    how = how._replace(schedules=how.schedules or tuple(x for x in (*OURS, *RIVALS) if x not in why))
    model = f"Llama, {args.layers} layers, random weights, {args.dtype}"
    about = dict(command="step", model=model, compute="real", wrapper=args.wrapper)
    checked = "losses and gradients of all steps agree: worst difference {worst} of what is allowed"
    session.run_cases(args, about, how, todo, functools.partial(_run_case, args, how), checked, calibrate=False)


def _run_case(args, how, case: Case, ranks, *topology) -> list[Measurement]:
    """Rows of all contenders. Raises `WrongResult` unless their losses and gradients are right."""
    sizes = dict(heads=case.num_heads, kv_heads=case.num_heads_kv, head_dim=case.head_dim)
    width = case.num_heads * case.head_dim
    model = models.random_llama(layers=args.layers, positions=case.seq_len, hidden_size=width, **sizes)
    model = model.to(DTYPES[case.dtype])
    names = [name for name in how.schedules if name != "ulysses" or case.machines.ranks <= case.num_heads]
    meeting = Meeting(case.machines.ranks, timeout_s=session.LIMIT_S)
    truth = shared_tensor((1 + sum(p.numel() for p in model.parameters()),), torch.float32)
    by_rank = ranks.run(_on_rank, args, how, case, model, names, meeting, truth, timeout_s=session.LIMIT_S)
    given = {**case._asdict(), "machines": case.machines.label, "ranks": case.machines.ranks}
    rows, totals = [], {}
    for name, outcomes in zip(names, zip(*by_rank)):
        error, plan, warm_up, _ = outcomes[0]
        if not error <= 1:
            raise WrongResult(f"{name} is wrong on {case.label}: {error:.3g} times the error that is allowed")
        if plan:
            print(f"{name}: {warm_up} steps until the plan was chosen: {plan}", flush=True)
        measured = [x for *_, x in outcomes]
        base = Measurement(**given, compute="real", schedule=name)
        passes = measurements(base, measured, {}, case.machines)
        if name in RIVALS:  # what others send is not logged; a node's counter sees it
            passes = [row._replace(sent_bytes=None) for row in passes]
        totals[name] = _totals(measured)
        turns = [x / y for x, y in zip(totals[name], totals[names[0]])]
        rows += [*passes[:-1], passes[-1]._replace(error=error, plan=plan, ratio=statistics.median(turns))]
    return rows


def _totals(ranks: list[Measured]) -> list[float]:
    """Seconds of each step: of the slowest rank in each pass."""
    passes = [[max(times) for times in zip(*(rank.seconds[name] for rank in ranks))] for name in ranks[0].seconds]
    return [sum(times) for times in zip(*passes)]


def _on_rank(args, how, case: Case, model, names, meeting: Meeting, truth: Tensor) -> list[tuple]:
    """One rank's part of a case, for each contender: (error, plan, steps to warm up, measurements).

    None is timed if one of them is wrong.
    """
    group = join(timeout_s=session.LIMIT_S)
    rank = comm.group_rank(group)
    tokens = torch.randint(0, model.config.vocab_size, (case.batch, case.seq_len), generator=torch.manual_seed(1))
    start = functools.partial(STARTS[args.wrapper], group=group, case=case)
    if rank == 0:
        plain = Contender("plain", model, tokens, None, case)
        plain.step(Laps([]))
        truth[0], truth[1:] = plain.losses[0], plain.gradient
    meeting.meet(rank)
    allowed, contenders, timings, errors = ALLOWED[model.dtype], [], [], []
    for name in names:
        one = Contender(name, model, tokens, group, case, start)
        contenders.append(one)
        timings.append(Timing(one.step, rank, meeting, how, case.machines.emulated))
        loss, gradient = truth[0], truth[1:]
        local = max(abs(one.losses[0] / loss - 1), (one.gradient - gradient).norm() / gradient.norm())
        (error,) = meeting.most(rank, float(local) / allowed)
        errors.append(error if error == error else math.inf)
        one.gradient = None
        if not errors[-1] <= 1:
            return [(error, None, 0, None) for error in errors]
    for one in contenders:
        while len(one.losses) < 2 or (len(one.losses) < MOST_WARM_UP and not _settled(group)):
            one.step(Laps([]))
    warm_up = [len(one.losses) for one in contenders]
    take_turns(timings)
    first = contenders[0]
    for i, one in enumerate(contenders):
        later = [
            abs(x / y - 1) for mine in ("losses", "norms") for x, y in zip(getattr(one, mine), getattr(first, mine))
        ]
        errors[i] = max(errors[i], meeting.most(rank, max(later) / (LATER * allowed))[0])
    if args.profile:
        _profile(contenders[0], rank)
    meeting.meet(rank)
    plans = [_plan(group) if name == "auto" else None for name in names]
    return list(zip(errors, plans, warm_up, (timing.measured() for timing in timings)))


def _settled(group) -> bool:
    return all(tuning.chosen is not None for tuning in GroupState.of(group).tunings.values())


def _plan(group) -> str | None:
    """The plans that were chosen in the group, if any were tried."""
    chosen = [tuning.chosen for tuning in GroupState.of(group).tunings.values()]
    return "; ".join(f"{plan.forward} / {plan.backward}" for plan in chosen if plan) or None


def _profile(one: Contender, rank: int) -> None:
    """Five steps of a contender, printed by rank 0."""
    profile = cProfile.Profile()
    with profile if rank == 0 else contextlib.nullcontext():
        for _ in range(5):
            one.step(Laps([]))
    if rank == 0:
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
