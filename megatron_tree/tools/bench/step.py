"""A Llama's training step over a sharded sequence: ours, DeepSpeed's Ulysses and torch's context parallelism in one
Transformers model, with the same weights, batches, average of gradients and AdamW. The first step's loss and gradients
are compared with one rank's, later losses and gradient norms with each other's, before any time is shown."""

from __future__ import annotations

import argparse
import contextlib
import copy
import cProfile
import functools
import importlib
import os
import pathlib
import pstats
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from transformers import AttentionInterface, AttentionMaskInterface

from ...core import comm
from ...core.comm.group import GroupState
from ...core.config import TreeConfig
from ...core.files import whole_file
from ...core.layout import shard_positions
from ...integrations.transformers import models
from ...integrations.transformers.train.sequence_parallel import register_sequence_parallel
from ..calibrate.kernel_cases import DTYPES, WrongResult
from . import cases
from .cases import Case, Settings
from .results import Measurement, measurements
from .rivals import TRAIN, no_torch_ring
from .timing import Laps, Meeting, RankTimes, Timing, join, shared_tensor, take_turns

ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative error of the first step's loss and gradients."""
VOCAB, LR, IGNORED = 256, 1e-4, -100
LATER = 50.0  # of later steps' losses and gradient norms, by this factor: AdamW divides small gradients by themselves
OURS = {
    "auto": lambda world: {},
    "ulysses": lambda world: dict(ulysses_size=world),
    "grid": lambda world: dict(ulysses_size=1),
    "ring": lambda world: dict(schedule="ring"),
}
ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
RIVALS = ("deepspeed", *TRAIN)


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    how, todo, why = cases.settings_of(args), cases.cases_of(args), missing()
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
    cases.run_cases(args, about, how, todo, functools.partial(_run_case, args, how), checked, calibrate=False)


class StepOutcome(NamedTuple):
    """One rank's outcome of one contender."""

    error: float
    """As a fraction of what is allowed; the same on all ranks."""
    plan: str | None
    """What was chosen by measuring, if anything."""
    measured: RankTimes | None
    """None if a contender was wrong."""


def _run_case(args, how: Settings, case: Case, ranks, *_) -> list[Measurement]:
    """Rows of all contenders. Raises `WrongResult` unless their losses and gradients are right."""
    shape = dict(heads=case.num_heads, kv_heads=case.num_heads_kv, head_dim=case.head_dim, layers=args.layers)
    width = case.num_heads * case.head_dim
    model = models.random_llama(**shape, positions=case.seq_len, hidden_size=width, vocab_size=VOCAB)
    model = model.to(DTYPES[case.dtype])
    names = [name for name in how.schedules if name != "ulysses" or case.machines.ranks <= case.num_heads]
    meeting = Meeting(case.machines.ranks, timeout_s=cases.LIMIT_S)
    truth = shared_tensor((1 + sum(p.numel() for p in model.parameters()),), torch.float32)
    by_rank = ranks.run(_on_rank, args, how, case, model, names, meeting, truth, timeout_s=cases.LIMIT_S)
    for name, one in zip(names, by_rank[0]):
        if not one.error <= 1:
            raise WrongResult(f"{name} is wrong on {case.label}: {one.error:.3g} times the error that is allowed")
    rows, first = [], _seconds_of_steps(by_rank, names.index("auto") if "auto" in names else 0)
    for number, (name, one) in enumerate(zip(names, by_rank[0])):
        base = case.measurement(model="Llama", compute="real", schedule=name)
        measured = [outcomes[number].measured for outcomes in by_rank]
        passes = measurements(base, measured, {}, case.machines.ranks_per_node)
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
    group = join(timeout_s=cases.LIMIT_S)
    rank, generator = comm.group_rank(group), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (1, case.seq_len), generator=generator)
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


def missing() -> dict[str, str]:
    """The rivals that can't run here, and why."""
    why = {}
    try:  # before ranks are forked: it takes seconds
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        importlib.import_module(ULYSSES)
    except ImportError as error:
        why["deepspeed"] = f"{ULYSSES}: {error}"
    return why | (dict.fromkeys(TRAIN, reason) if (reason := no_torch_ring()) else {})


class Contender:
    """A model that attends over the ranks in one way, its optimizer and its batch.

    Args: name of OURS or RIVALS, or "plain": one rank alone, without a group. model: of which it takes a copy.
        tokens: int64 [b, s], the same on all ranks. wrapper: of `WRAPPERS`.
    Attributes: losses, norms: of each step, of the gradient before it is clipped. gradient: of the first step, flat in
        fp32, all of it.
    """

    def __init__(self, name: str, model, tokens: Tensor, case: Case, group=None, wrapper: str | None = None):
        self.losses, self.norms, self.gradient = [], [], None
        self._model, self._group = copy.deepcopy(model).train(), group
        self._world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        self._parallel = None
        if name in OURS:
            config = TreeConfig(**OURS[name](self._world))
            self._parallel = register_sequence_parallel(self._model, tree_config=config)
        elif name in RIVALS:
            attend = _deepspeed(self._model, group, case) if name == "deepspeed" else _torchs(name, group)
            AttentionInterface.register(f"bench_{name}", attend)
            AttentionMaskInterface.register(f"bench_{name}", lambda *args, **kwargs: None)
            self._model.set_attn_implementation(f"bench_{name}")
        self._tokens, share = tokens, case.seq_len // self._world
        contiguous = torch.arange(rank * share, (rank + 1) * share)
        self._rows = shard_positions(case.seq_len, rank, self._world) if name in TRAIN else contiguous
        self._average = WRAPPERS[wrapper](self._model, group) if wrapper else None
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)

    def step(self, laps: Laps) -> tuple:
        """One training step; no results that repeat."""
        ours, parameters = self._parallel is not None, list(self._model.parameters())
        whole = {"input_ids": self._tokens, "labels": self._tokens}
        batch = self._parallel.shard_batch(whole) if ours else self._shard()
        laps("batch")
        loss = self._model(**batch).loss  # ours: of all ranks' tokens; others: this rank's share of it
        shown = loss.detach().clone()
        if not ours and self._world > 1:
            dist.all_reduce(shown, group=self._group)
        laps("forward")
        (loss if ours else loss * self._world).backward()
        laps("backward")
        if self._average:
            self._average(parameters)
        if not self.losses:
            self.gradient = torch.cat([_whole(p.grad).flatten().float() for p in parameters])
        self.norms.append(float(_whole(torch.nn.utils.clip_grad_norm_(parameters, 1.0))))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(float(shown))
        laps("optimizer")
        return ()

    def _shard(self) -> dict:
        """This rank's tokens; their loss is a sum, divided by the number of all labels."""
        b, s = self._tokens.shape
        labels = F.pad(self._tokens[:, 1:], (0, 1), value=IGNORED)[:, self._rows]
        own = {"input_ids": self._tokens[:, self._rows], "position_ids": self._rows.expand(b, -1)}
        return {**own, "labels": labels, "shift_labels": labels, "num_items_in_batch": b * (s - 1), "use_cache": False}


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _torchs(name: str, group):
    """torch's context parallelism as an attention function of Transformers."""

    def attend(module, q, k, v, attention_mask, **kwargs):
        return TRAIN[name](group, *(x.transpose(1, 2) for x in (q, k, v))), None

    return attend


def _deepspeed(model, group, case: Case):
    """DeepSpeed's Ulysses as an attention function of Transformers, with heads padded to a number that it can take."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled, and sums over all ranks
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    world, h_kv = dist.get_world_size(group), case.num_heads_kv
    ratio = case.num_heads // h_kv
    if h_kv % world and world % h_kv:
        h_kv += -h_kv % world
    while h_kv * ratio % world:
        ratio += 1
    exchange = importlib.import_module(ULYSSES).UlyssesSPAttentionHF(
        attn=sdpa_attention_forward,
        batch_size=1,
        attn_head_count=h_kv * ratio,
        attn_head_size=case.head_dim,
        kv_head_count=h_kv,
        num_hidden_layers=model.config.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
    )
    if h_kv * ratio == case.num_heads:
        return lambda module, q, k, v, mask, **options: exchange(module, q, k, v, None, **options)
    more = h_kv - case.num_heads_kv, ratio - case.num_heads // case.num_heads_kv

    def attend(module, q, k, v, mask, **options):
        groups = q.unflatten(1, (k.shape[1], -1))  # [b, h_kv, h / h_kv, s, d]
        q = F.pad(groups, (0, 0, 0, 0, 0, more[1], 0, more[0])).flatten(1, 2)
        k, v = (F.pad(x, (0, 0, 0, 0, 0, more[0])) for x in (k, v))
        module.num_key_value_groups = ratio
        out, _ = exchange(module, q, k, v, None, **options)  # [b, s, padded heads * d]
        out = out.unflatten(-1, (h_kv, ratio, -1))[:, :, : groups.shape[1], : groups.shape[2]]
        return out.flatten(2), None

    return attend


def _averaging(model, group):
    """Average all gradients over the ranks in one message."""
    world = dist.get_world_size(group)

    def average(parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters]
        flat = torch.cat([x.flatten() for x in gradients])
        dist.all_reduce(flat, group=group)
        flat /= world
        for mine, x in zip(flat.split([x.numel() for x in gradients]), gradients):
            x.copy_(mine.view_as(x))

    return average


def _fsdp2(model, group) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)


WRAPPERS = {"average": _averaging, "fsdp2": _fsdp2}
"""What averages gradients, by name: (model, group) -> what is to be done after a backward, or None."""
