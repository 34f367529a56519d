"""The training run: build, resume, train, validate, save, report."""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

from .. import comm
from ..comm.rendezvous import start_on_own_device
from ..comm.wire import share_all
from ..integrations import megatron as tree
from ..integrations.megatron.cpu import megatron_on_cpu
from .checkpoint import load_checkpoint, save_checkpoint
from .data import Corpus, load_corpus
from .model import Trainee, build_trainee, seed_generators, start_model_parallel
from .report import Reporter
from .step import evaluate, train_step

FINAL_STEPS = 10  # whose mean is the final loss
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # schedulers send either; Slurm: --signal=USR1@120


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
    """In this context SIGTERM and SIGUSR1 are only recorded, in the list; all ranks stop after the same step."""
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
        dist.barrier()
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

    Raises: ValueError for options that don't fit the checkpoint or the data.
    """
    corpus = _open_corpus(args)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    start_model_parallel(args)
    trainee = build_trainee(args, device)
    iteration, samples, notes = load_checkpoint(trainee, args, digest=corpus.digest)
    reporter = Reporter(args, first_step=iteration + 1, enabled=dist.get_rank() == 0)
    unigram = corpus.train.unigram_entropy()
    for line in (_introduction(reporter, args, corpus, trainee, unigram), *notes):
        reporter.say(line)
    stopped, losses = False, deque(maxlen=FINAL_STEPS)
    while iteration < args.train_iters and not stopped:
        started = time.monotonic()
        seed_generators(args, iteration + 1)
        with comm.monitored(f"step {iteration + 1}"):
            figures, stopping = train_step(trainee, corpus.train, args, samples, device, bool(received))
        iteration += 1
        samples += args.global_batch_size
        losses.append(figures["loss"])
        seconds = time.monotonic() - started
        tokens_per_s = args.global_batch_size * args.seq_length / seconds
        reporter.step(iteration, **figures, tokens_per_s=tokens_per_s, seconds=seconds)
        last = iteration == args.train_iters
        stopped = stopping and not last
        if args.eval_iters and _due(args.eval_interval, iteration, last) and not stopped:
            with comm.monitored(f"the validation after step {iteration}"):
                reporter.validation(iteration, evaluate(trainee, corpus.valid, args, device))
        if args.save and _due(args.save_interval, iteration, last or stopped):
            with comm.monitored(f"the save after step {iteration}"):
                folder = save_checkpoint(trainee, args, iteration=iteration, samples=samples, digest=corpus.digest)
            reporter.say(f"checkpoint: {folder}")
    outcome = RunOutcome(iteration, sum(losses) / len(losses), unigram, stopped)
    _conclude(reporter, args, outcome)
    return outcome


def _due(interval: int, iteration: int, last: bool) -> bool:
    return last or (interval > 0 and iteration % interval == 0)


def _open_corpus(args: argparse.Namespace) -> Corpus:
    options = {"suffix": args.data_suffix, "tokenizer_model": args.tokenizer_model}
    corpus = load_corpus(args.data_path, seq_length=args.seq_length, seed=args.seed, **options)
    digests = share_all(corpus.digest, dist.group.WORLD)
    if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ValueError(
            f"the training data on ranks {differing} are not those on rank 0: give all the same data_path (without it, "
            "the same Python release)"
        )
    return corpus


def _introduction(
    reporter: Reporter, args: argparse.Namespace, corpus: Corpus, trainee: Trainee, unigram: float
) -> str:
    dp, parameters = parallel_state.get_data_parallel_world_size(), sum(p.numel() for p in trainee.model.parameters())
    attention = " ".join(args.cp_comm_type) if args.context_parallel_size > 1 else "Megatron's own attention"
    if args.grid:
        attention += " {}x{}".format(*args.grid)
    title = f"{dist.get_world_size()} ranks, context parallel {args.context_parallel_size}: {attention}"
    reporter.event("start", title=title, options=vars(args), unigram_loss=unigram)
    return (
        f"{title}; data parallel {dp}, {parameters:,} parameters on rank 0, {corpus.num_documents:,} documents, "
        f"{corpus.train.tokens.size:,} tokens, unigram loss {unigram:.4f}"
    )


def _conclude(reporter: Reporter, args: argparse.Namespace, outcome: RunOutcome) -> None:
    loss, unigram = outcome.final_loss, outcome.unigram
    reporter.event("end", final_loss=loss, unigram_loss=unigram)
    reporter.close()
    reporter.say(f"log and loss curve: {args.output_dir}")
    if outcome.stopped:
        way_on = f"continue with --load {args.save}" if args.save else "nothing is saved without --save"
        reporter.say(f"stopped by a signal after step {outcome.iteration} of {args.train_iters}; {way_on}")
    else:
        reporter.say(f"final loss {loss:.4f} nats per token, unigram model {unigram:.4f}: {unigram - loss:.4f} below")
