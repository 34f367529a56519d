"""The training run: build, resume, train, validate, save, report."""

from __future__ import annotations

import argparse
import signal
import time
from collections import deque
from importlib import metadata
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

from .. import comm
from ..integrations import megatron as tree
from ..integrations.megatron.cpu import megatron_on_cpu
from .checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from .data import Corpus, open_corpus
from .distributed import launched_rank, require_equal, start_process_group
from .model import Trainee, build_trainee, start_model_parallel
from .report import Reporter
from .step import evaluate, train_step

FINAL_STEPS = 10  # whose mean is the final loss
PACKAGES = ("torch", "megatron-core", "numpy")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # schedulers send either; Slurm: --signal=USR1@120


class StopRequest:
    """A context in which SIGTERM and SIGUSR1 are only recorded; all ranks stop after the same step (`train_step`)."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first that reached this rank."""

    def __enter__(self) -> StopRequest:
        self._former = {number: signal.signal(number, self._record) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: object) -> None:
        self.signal = self.signal or signal.Signals(number)


class Outcome(NamedTuple):
    """How a run ended, the same on every rank."""

    iteration: int
    final_loss: float
    """Mean over the last steps, nats per token."""
    unigram: float | None
    """Loss of the byte unigram model; None for indexed datasets."""
    stopped: bool
    """A signal ended it before its last step."""


class LossTooHigh(Exception):
    """The final loss misses --assert-below-unigram; raised on every rank."""


def run(args: argparse.Namespace) -> None:
    """The life of one rank of launch/train_gpt.py. args: completed and checked options."""
    with StopRequest() as stop:  # from here on a signal ends the run after a step, with a checkpoint
        device = start_process_group(launched_rank(), args.distributed_timeout_minutes)
        with megatron_on_cpu():
            tree.install()
            outcome = train(args, device, stop)
        dist.barrier()
        dist.destroy_process_group()
    loss, unigram, margin = outcome.final_loss, outcome.unigram, args.assert_below_unigram
    if margin is not None and not outcome.stopped and not loss <= unigram - margin:
        raise LossTooHigh(
            f"the final loss {loss:.4f} is not {margin} below the byte unigram model's {unigram:.4f} "
            "(--assert-below-unigram): train longer, or look for what is wrong"
        )


def train(args: argparse.Namespace, device: torch.device, stop: StopRequest) -> Outcome:
    """Train as the options say. All ranks call it, with the default process group initialized.

    Raises: ValueError for options that don't fit the checkpoint or the data.
    """
    corpus = open_corpus(args)
    require_equal("the training data (what data_path holds, or without it the Python release)", corpus.digest)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    start_model_parallel(args)
    trainee = build_trainee(args, device)
    iteration, samples, notes = _resume(args, trainee, corpus)
    reporter = Reporter(args, first_step=iteration + 1, enabled=dist.get_rank() == 0)
    _introduce(reporter, args, corpus, trainee, iteration + 1)
    for note in notes:
        reporter.say(note)
    checkpoint, stopped, losses = None, False, deque(maxlen=FINAL_STEPS)
    while iteration < args.train_iters and not stopped:
        started = time.monotonic()
        with comm.monitored(f"step {iteration + 1}"):
            figures, stopping = train_step(trainee, corpus.train, args, samples, device, stop.signal is not None)
        iteration += 1
        samples += args.global_batch_size
        losses.append(figures["loss"])
        seconds = time.monotonic() - started
        tokens_per_s = args.global_batch_size * args.seq_length / seconds
        reporter.step(iteration, **figures, tokens_per_s=tokens_per_s, seconds=seconds)
        last = iteration == args.train_iters
        stopped = stopping and not last
        if corpus.valid is not None and args.eval_iters and _due(args.eval_interval, iteration, last) and not stopped:
            with comm.monitored(f"the validation after step {iteration}"):
                reporter.validation(iteration, evaluate(trainee, corpus.valid, args, device))
        if args.save and _due(args.save_interval, iteration, last or stopped):
            with comm.monitored(f"the save after step {iteration}"):
                checkpoint = save_checkpoint(trainee, args, iteration=iteration, samples=samples, digest=corpus.digest)
    outcome = Outcome(iteration, sum(losses) / len(losses), corpus.unigram, stopped)
    _conclude(reporter, args, outcome, checkpoint)
    return outcome


def _due(interval: int, iteration: int, last: bool) -> bool:
    return last or (interval > 0 and iteration % interval == 0)


def _resume(args: argparse.Namespace, trainee: Trainee, corpus: Corpus) -> tuple[int, int, list[str]]:
    """Load a checkpoint if the options name one. Returns: (iteration, samples consumed, lines to print)."""
    notes: list[str] = []
    checkpoint = find_checkpoint(args, notes.append)
    if checkpoint is None:
        if args.resume:
            notes.append(f"no checkpoint in {args.save} yet: starting from scratch")
        return 0, 0, notes
    iteration, samples, same_layout = load_checkpoint(checkpoint, trainee, args, digest=corpus.digest)
    if iteration >= args.train_iters:
        raise ValueError(f"train_iters={args.train_iters}, but {checkpoint} has already done {iteration}")
    notes.append(f"continuing from {checkpoint}")
    if not same_layout and (args.attention_dropout or args.hidden_dropout):
        notes.append("warning: another parallel layout than the checkpoint's: dropout starts with fresh random states")
    return iteration, samples, notes


def _introduce(reporter: Reporter, args: argparse.Namespace, corpus: Corpus, trainee: Trainee, first_step: int) -> None:
    ranks, dp = dist.get_world_size(), parallel_state.get_data_parallel_world_size()
    parameters = sum(p.numel() for p in trainee.model.parameters())
    attention = " ".join(args.cp_comm_type) if args.context_parallel_size > 1 else "Megatron's own attention"
    if args.grid:
        attention += " {}x{}".format(*args.grid)
    title = f"{ranks} ranks, context parallel {args.context_parallel_size}: {attention}"
    reporter.event(
        "start",
        title=title,
        first_step=first_step,
        options=vars(args),
        versions={name: metadata.version(name) for name in PACKAGES},
        ranks=ranks,
        data_parallel_size=dp,
        parameters_on_rank_0=parameters,
        documents=corpus.num_documents,
        train_tokens=corpus.num_tokens,
        unigram_loss=corpus.unigram,
    )
    unigram = "" if corpus.unigram is None else f", byte unigram loss {corpus.unigram:.4f}"
    reporter.say(
        f"{title}; data parallel {dp}, {parameters:,} parameters on rank 0, {corpus.num_documents:,} documents, "
        f"{corpus.num_tokens:,} tokens{unigram}"
    )


def _conclude(reporter: Reporter, args: argparse.Namespace, outcome: Outcome, checkpoint) -> None:
    reporter.event("end", final_loss=outcome.final_loss, unigram_loss=outcome.unigram)
    reporter.close()
    if checkpoint is not None:
        reporter.say(f"checkpoint: {checkpoint}")
    reporter.say(f"log and loss curve: {args.output_dir}")
    loss, unigram = outcome.final_loss, outcome.unigram
    if outcome.stopped:
        way_on = f"continue with --load {args.save}" if args.save else "nothing is saved without --save"
        reporter.say(f"stopped by a signal after step {outcome.iteration} of {args.train_iters}; {way_on}")
    elif unigram is None:
        reporter.say(f"final loss {loss:.4f} nats per token")
    else:
        reporter.say(
            f"final loss {loss:.4f} nats per byte, byte unigram model {unigram:.4f}: {unigram - loss:.4f} below"
        )
