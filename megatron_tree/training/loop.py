"""The training run: build, resume, train, validate, save, report."""

from __future__ import annotations

import argparse
import platform
import time
from importlib import metadata
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

from .. import comm
from .checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from .data import Corpus, open_corpus
from .distributed import require_equal
from .model import Trainee, build_trainee, padded_vocab_size, start_model_parallel
from .report import Reporter
from .step import evaluate, train_step
from .stop import StopRequest
from .throughput import Throughput

PACKAGES = ("torch", "megatron-core", "deepspeed", "numpy")


class Outcome(NamedTuple):
    """How a run ended, the same on every rank."""

    iteration: int
    final_loss: float
    """Mean over the last steps, nats per token."""
    unigram: float | None
    """Loss of the byte unigram model; None for indexed datasets."""
    stopped: bool
    """A signal ended it before its last step."""


def train(args: argparse.Namespace, device: torch.device, stop: StopRequest) -> Outcome:
    """Train as the options say. All ranks call it, with the default process group initialized.

    Raises: ValueError for options that don't fit the checkpoint or the data.
    """
    corpus = open_corpus(args)
    require_equal("the training data (what data_path holds, or without it the Python release)", corpus.digest)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    start_model_parallel(args)
    trainee = build_trainee(args, device)
    iteration, samples, notes = _continue(args, trainee, corpus)
    speed = Throughput(
        args,
        vocab_size=padded_vocab_size(args.vocab_size, args.tensor_model_parallel_size),
        world_size=dist.get_world_size(),
        device=device,
    )
    reporter = Reporter(
        args.output_dir,
        first_step=iteration + 1,
        last_step=args.train_iters,
        unigram=corpus.unigram,
        log_interval=args.log_interval,
        tensorboard_dir=args.tensorboard_dir,
        enabled=dist.get_rank() == 0,
    )
    _introduce(reporter, args, corpus, trainee, device, speed, notes)
    saved_at, stopped = None, False
    while iteration < args.train_iters and not stopped:
        started = time.monotonic()
        with comm.stage(f"step {iteration + 1}"):
            step = train_step(trainee, corpus.train, args, samples, device, stop)
        iteration += 1
        samples += args.global_batch_size
        figures = speed.figures(time.monotonic() - started)
        if args.fp16:
            figures |= {"loss_scale": trainee.loss_scale(), "skipped": step.skipped}
        reporter.step(iteration, loss=step.loss, grad_norm=step.grad_norm, lr=step.lr, **figures)
        last = iteration == args.train_iters
        stopped = step.stop and not last
        if corpus.valid is not None and args.eval_iters and _due(args.eval_interval, iteration, last) and not stopped:
            with comm.stage(f"the validation after step {iteration}"):
                reporter.validation(iteration, evaluate(trainee, corpus.valid, args, device))
        if args.save and _due(args.save_interval, iteration, last or stopped):
            with comm.stage(f"the save after step {iteration}"):
                saved_at = save_checkpoint(
                    args.save, trainee, args, iteration=iteration, samples=samples, digest=corpus.digest
                )
    outcome = Outcome(iteration, reporter.final_loss(), corpus.unigram, stopped)
    reporter.close()
    _conclude(reporter, args, outcome, saved_at)
    return outcome


def _due(interval: int, iteration: int, last: bool) -> bool:
    return last or (interval > 0 and iteration % interval == 0)


def _continue(args: argparse.Namespace, trainee: Trainee, corpus: Corpus) -> tuple[int, int, list[str]]:
    """Load a checkpoint if the options name one. Returns: (iteration, samples consumed, what to tell)."""
    notes: list[str] = []
    checkpoint = find_checkpoint(args, notes.append)
    if checkpoint is None:
        if args.resume:
            notes.append(f"no checkpoint in {args.save} yet: starting afresh")
        return 0, 0, notes
    iteration, samples, same_layout = load_checkpoint(checkpoint, trainee, args, digest=corpus.digest)
    if iteration >= args.train_iters:
        raise ValueError(f"train_iters={args.train_iters}, but {checkpoint} has done {iteration} already")
    notes.append(f"continuing from {checkpoint}")
    if not same_layout and (args.attention_dropout or args.hidden_dropout):
        notes.append("warning: another parallel layout than the checkpoint's: dropout starts with fresh random states")
    return iteration, samples, notes


def _conclude(reporter: Reporter, args: argparse.Namespace, outcome: Outcome, saved_at) -> None:
    if saved_at is not None:
        reporter.say(f"checkpoint: {saved_at}")
    reporter.say(f"log and loss curve: {args.output_dir}")
    if outcome.stopped:
        after = f"stopped by a signal after step {outcome.iteration} of {args.train_iters}"
        way_on = f"; continue with --load {args.save}" if args.save else "; nothing is saved without --save"
        reporter.say(after + way_on)
    elif outcome.unigram is None:
        reporter.say(f"final loss {outcome.final_loss:.4f} nats per token")
    else:
        reporter.say(
            f"final loss {outcome.final_loss:.4f} nats per byte, byte unigram model {outcome.unigram:.4f}: "
            f"{outcome.unigram - outcome.final_loss:.4f} below"
        )


def _introduce(
    reporter: Reporter,
    args: argparse.Namespace,
    corpus: Corpus,
    trainee: Trainee,
    device: torch.device,
    speed: Throughput,
    notes: list[str],
) -> None:
    sizes = {
        "ranks": dist.get_world_size(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
        "parameters_on_rank_0": trainee.num_parameters(),
        "documents": corpus.num_documents,
        "train_tokens": corpus.num_tokens,
    }
    attention = " ".join(args.cp_comm_type) if args.context_parallel_size > 1 else "Megatron's own attention"
    if args.grid and args.context_parallel_size > 1:
        attention += " {}x{}".format(*args.grid)
    title = f"{sizes['ranks']} ranks, context parallel {args.context_parallel_size}: {attention}"
    versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
    facts = {"title": title, "device": str(device), "peak_tflops": speed.peak}
    reporter.header(**facts, options=vars(args), versions=versions, **sizes)
    unigram = "" if corpus.unigram is None else f", byte unigram loss {corpus.unigram:.4f}"
    reporter.say(
        f"{title}; data parallel {sizes['data_parallel_size']}, "
        f"{sizes['parameters_on_rank_0']:,} parameters on rank 0, "
        f"{sizes['documents']:,} documents, {sizes['train_tokens']:,} tokens{unigram}"
    )
    for note in notes:
        reporter.say(note)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
