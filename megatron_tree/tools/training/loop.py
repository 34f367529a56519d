"""The training run: build, resume, train, validate, save, report."""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
from torch import Tensor

from ...core import comm
from ...core.comm.rendezvous import start_on_own_device
from ...core.comm.wire import share_all
from ...integrations import megatron as tree
from ...integrations.megatron.compat import batch_on_this_cp_rank
from ...integrations.megatron.cpu import megatron_on_cpu
from ...launching import start_errors, together
from .checkpoint import load_checkpoint, on_first_rank, save_checkpoint
from .data import PackedText, load_text, microbatch_indices
from .model import Trainee, build_trainee, start_model_parallel
from .report import Reporter

FINAL_STEPS = 10  # whose mean is the final loss
# Ctrl-C, and what schedulers send; Slurm: --signal=USR1@120
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class RunOutcome(NamedTuple):
    """How a run ended, the same on every rank."""

    iteration: int
    final_loss: float
    """Mean over the last steps, nats per token."""
    unigram: float
    """Loss of the unigram model of the training tokens."""
    stopped: bool
    """A signal ended it before its last step."""


class LossTooHigh(Exception):
    """The final loss misses --assert-below-unigram; raised on every rank."""


@contextlib.contextmanager
def recorded_signals() -> Iterator[list[int]]:
    """In this context `STOP_SIGNALS` are only recorded, in the list; all ranks stop after the same step."""
    received: list[int] = []
    former = {number: signal.signal(number, lambda number, _: received.append(number)) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def run(args: argparse.Namespace) -> None:
    """Train on this rank, from the process group to the last line of output. args: completed and checked options."""
    with recorded_signals() as received:  # from here on a signal ends the run after a step, with a checkpoint
        device = start_on_own_device(60 * args.distributed_timeout_minutes)
        with megatron_on_cpu():
            tree.install()
            outcome = train(args, device, received)
        dist.destroy_process_group()
    loss, unigram, margin = outcome.final_loss, outcome.unigram, args.assert_below_unigram
    if margin is not None and not outcome.stopped and not loss <= unigram - margin:
        raise LossTooHigh(
            f"the final loss {loss:.4f} is not {margin} below the unigram model's {unigram:.4f} "
            "(--assert-below-unigram): train longer, or look for what is wrong"
        )


def train(args: argparse.Namespace, device: torch.device, received: list[int]) -> RunOutcome:
    """Train as the options say, until `received` holds a signal on some rank. All ranks call it, with the default
    process group initialized.

    Raises: StartError for options that don't fit the checkpoint or the data.
    """
    with start_errors():
        text, digest = _open_text(args)
    with comm.monitored("the start"):
        initialize_rerun_state_machine(mode=RerunMode.DISABLED)
        start_model_parallel(args)
        trainee = build_trainee(args, device)
        trainee.model.train()
        with start_errors():
            iteration, samples, notes = load_checkpoint(trainee, args, digest=digest)
            reporters = [Reporter(args, first_step=iteration + 1, enabled=False)]
            on_first_rank(lambda: reporters.append(Reporter(args, first_step=iteration + 1, enabled=True)), args)
            reporter = reporters[-1]
        unigram = text.unigram_entropy()
        title, lines = _introduction(args, text, trainee, unigram)
        reporter.event("start", title=title, first_step=iteration + 1, options=vars(args), unigram_loss=unigram)
        for note in (lines, *notes):
            reporter.say(note)
    stopped, losses = False, deque(maxlen=FINAL_STEPS)
    while iteration < args.train_iters and not stopped:
        started = time.monotonic()
        iteration += 1
        with comm.monitored(f"step {iteration}"):
            figures, stopping = train_step(trainee, text, args, samples, device, bool(received))
            seconds = time.monotonic() - started
            tokens_per_s = args.global_batch_size * args.seq_length / seconds
            reporter.step(iteration, **figures, tokens_per_s=tokens_per_s, seconds=seconds)
        samples += args.global_batch_size
        losses.append(figures["loss"])
        last = iteration == args.train_iters
        stopped = stopping and not last
        if args.save and (last or stopped or (args.save_interval and iteration % args.save_interval == 0)):
            with comm.monitored(f"the save after step {iteration}"):
                folder = save_checkpoint(trainee, args, iteration=iteration, samples=samples, digest=digest)
            reporter.say(f"checkpoint: {folder}")
    outcome = RunOutcome(iteration, sum(losses) / len(losses), unigram, stopped)
    with comm.monitored("the end"):
        _conclude(reporter, args, outcome)
        dist.barrier()
    return outcome


def train_step(
    trainee: Trainee, text: PackedText, args: argparse.Namespace, samples: int, device: torch.device, stopping: bool
) -> tuple[dict[str, float | None], bool]:
    """One optimizer step on the global batch that starts at sample number `samples`. All ranks call it.

    Args: stopping: whether this rank has been asked to stop.
    Returns: ({loss: mean over the tokens of the batch, in nats; grad_norm: before clipping; lr}, whether any rank has
        been asked to stop); equal on all ranks.
    Raises: RuntimeError if a gradient is infinite or NaN.
    """
    trainee.model.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    loss, stopping = _run_schedule(trainee, text, args, samples, device, stopping)
    lr = max(group["lr"] for group in trainee.optimizer.param_groups)
    succeeded, grad_norm, _ = trainee.optimizer.step()
    if not succeeded:
        raise RuntimeError("the optimizer refused the step: a gradient is infinite or NaN")
    trainee.scheduler.step(increment=args.global_batch_size)
    return {"loss": loss, "grad_norm": None if grad_norm is None else float(grad_norm), "lr": lr}, stopping


def _run_schedule(
    trainee: Trainee, text: PackedText, args: argparse.Namespace, samples: int, device: torch.device, stopping: bool
) -> tuple[float, bool]:
    """All microbatches of one global batch. Returns: (mean loss over all its tokens, whether any rank is stopping)."""
    num_microbatches = args.global_batch_size // (args.micro_batch_size * parallel_state.get_data_parallel_world_size())
    sums = forward_backward_no_pipelining(
        forward_step_func=_forward_step,
        data_iterator=_batches(text, args, samples, device),
        model=trainee.model,
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    total = torch.zeros(3, dtype=torch.float64, device=device)  # loss, tokens, ranks that were asked to stop
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for loss_sum, num_tokens in sums:
            total[:2] += torch.stack([loss_sum.double(), num_tokens.double()])
    total[2] = stopping
    dist.all_reduce(total)
    return float(total[0] / total[1]), bool(total[2] > 0)


def _batches(text: PackedText, args: argparse.Namespace, samples: int, device) -> Iterator[dict[str, Tensor]]:
    """This rank's microbatches: tokens, labels, loss_mask, position_ids, each [micro_batch_size, seq_length / cp]."""
    indices = microbatch_indices(
        samples,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
    )
    for numbers in indices:
        rows = torch.from_numpy(text.batch(numbers)).to(device)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        positions = torch.arange(args.seq_length, device=device).expand_as(tokens).contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=device)
        whole = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        yield batch_on_this_cp_rank(whole)


def _forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, functools.partial(_loss_func, batch["loss_mask"])


def _loss_func(loss_mask: Tensor, losses: Tensor):
    """(sum to differentiate, number of tokens, what is reported), of this rank's share of a microbatch."""
    total, num_tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, num_tokens.to(torch.int), (total.detach(), num_tokens)


def _open_text(args: argparse.Namespace) -> tuple[PackedText, str]:
    """The training text and its digest, which is the same on all ranks."""
    ranks = comm.Ranks.of(dist.group.WORLD, limit_s=60 * args.distributed_timeout_minutes)
    with together(args, ranks):
        sizes = {"seq_length": args.seq_length, "seed": args.seed}
        text = load_text(args.data_path, **sizes, tokenizer_model=args.tokenizer_model)
    digests = share_all(text.digest(), ranks)
    if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ValueError(
            f"the training data on ranks {differing} are not those on rank 0: give all the same data_path (without it, "
            "the same Python release)"
        )
    return text, digests[0]


def _introduction(args: argparse.Namespace, text: PackedText, trainee: Trainee, unigram: float) -> tuple[str, str]:
    """A title, and lines that say more."""
    dp, parameters = parallel_state.get_data_parallel_world_size(), sum(p.numel() for p in trainee.model.parameters())
    attention = args.cp_comm_type if args.context_parallel_size > 1 else "Megatron's own attention"
    world = dist.get_world_size()
    title = f"{world} rank{'s' * (world > 1)}, context parallel {args.context_parallel_size}: {attention}"
    return title, (
        f"{title}; data parallel {dp}, {parameters:,} parameters on rank 0\n"
        f"{text.tokens.size:,} tokens of text; a unigram model of it has loss {unigram:.4f}\n"
        "below: loss in nats per token; tokens/s of all ranks together, measured"
    )


def _conclude(reporter: Reporter, args: argparse.Namespace, outcome: RunOutcome) -> None:
    loss, unigram = outcome.final_loss, outcome.unigram
    reporter.event("end", final_loss=loss, unigram_loss=unigram)
    reporter.close()
    reporter.say(f"results: {args.output_dir}")
    if outcome.stopped:
        way_on = "continue with --resume" if args.save else "nothing is saved without --save"
        reporter.say(f"stopped by a signal after step {outcome.iteration} of {args.train_iters}; {way_on}")
    else:
        side = "below" if loss <= unigram else "above"
        difference = f"{abs(unigram - loss):.4f} {side} the unigram model's {unigram:.4f}"
        reporter.say(f"final loss {loss:.4f} nats per token, {difference}")
