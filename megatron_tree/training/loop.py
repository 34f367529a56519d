"""The training run: build, resume, train, validate, save, report."""

from __future__ import annotations

import argparse
import functools
import platform
import time
from importlib import metadata

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
from megatron.core.utils import get_batch_on_this_cp_rank

from .checkpoint import load_checkpoint, save_checkpoint
from .data import Corpus, PackedText, load_corpus, microbatch_indices
from .distributed import require_equal
from .model import Trainee, build_trainee, start_model_parallel
from .report import Reporter

PACKAGES = ("torch", "megatron-core", "deepspeed", "numpy")


def train(args: argparse.Namespace, device: torch.device) -> tuple[float, float]:
    """Train as the options say. All ranks call it, with the default process group initialized.

    Returns: (final loss, mean over the last steps; loss of the byte unigram model), nats per token, the same on every
    rank.
    Raises: ValueError for options that don't fit the checkpoint or the text.
    """
    corpus = load_corpus(args.data_path, suffix=args.data_suffix, seq_length=args.seq_length, seed=args.seed)
    require_equal("the training text (data_path, data_suffix, or the Python version)", corpus.digest)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    start_model_parallel(args)
    trainee = build_trainee(args, device)
    iteration, samples = 0, 0
    if args.load:
        iteration, samples = load_checkpoint(args.load, trainee, args, digest=corpus.digest)
        if iteration >= args.train_iters:
            raise ValueError(
                f"train_iters={args.train_iters}, but the checkpoint in {args.load} has done {iteration} already"
            )
    reporter = Reporter(
        args.output_dir,
        first_step=iteration + 1,
        last_step=args.train_iters,
        unigram=corpus.train.unigram_entropy(),
        log_interval=args.log_interval,
        enabled=dist.get_rank() == 0,
    )
    _introduce(reporter, args, corpus, trainee, device)
    saved_at = None
    while iteration < args.train_iters:
        started = time.monotonic()
        loss, grad_norm, lr = train_step(trainee, corpus.train, args, samples, device)
        iteration += 1
        samples += args.global_batch_size
        seconds = time.monotonic() - started
        speed = args.global_batch_size * args.seq_length / seconds
        reporter.step(iteration, loss=loss, grad_norm=grad_norm, lr=lr, tokens_per_s=speed, seconds=seconds)
        last = iteration == args.train_iters
        if args.eval_iters and (last or (args.eval_interval and iteration % args.eval_interval == 0)):
            reporter.validation(iteration, evaluate(trainee, corpus.valid, args, device))
        if args.save and (last or (args.save_interval and iteration % args.save_interval == 0)):
            saved_at = save_checkpoint(
                args.save, trainee, args, iteration=iteration, samples=samples, digest=corpus.digest
            )
    final, unigram = reporter.final_loss(), reporter.unigram
    reporter.close()
    if saved_at is not None:
        reporter.say(f"checkpoint: {saved_at}")
    reporter.say(f"log and loss curve: {args.output_dir}")
    reporter.say(f"final loss {final:.4f} nats per byte, byte unigram model {unigram:.4f}: {unigram - final:.4f} below")
    return final, unigram


def train_step(
    trainee: Trainee, text: PackedText, args: argparse.Namespace, samples: int, device: torch.device
) -> tuple[float, float | None, float]:
    """One optimizer step on the global batch that starts at sample number `samples`.

    Returns: (mean loss over the global batch's tokens, gradient norm before clipping, learning rate), equal on all
    ranks.
    """
    trainee.model.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    trainee.model.train()
    losses = _run_schedule(trainee, text, args, samples, device, forward_only=False)
    lr = max(group["lr"] for group in trainee.optimizer.param_groups)
    succeeded, grad_norm, _ = trainee.optimizer.step()
    if not succeeded:
        raise RuntimeError("the optimizer refused the step: a gradient is infinite or NaN")
    trainee.scheduler.step(increment=args.global_batch_size)
    return losses, grad_norm, lr


def evaluate(trainee: Trainee, text: PackedText, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over the first `eval_iters` global batches of the held-out documents."""
    trainee.model.eval()
    with torch.no_grad():
        losses = [
            _run_schedule(trainee, text, args, i * args.global_batch_size, device, forward_only=True)
            for i in range(args.eval_iters)
        ]
    trainee.model.train()
    return sum(losses) / len(losses)


def _run_schedule(
    trainee: Trainee,
    text: PackedText,
    args: argparse.Namespace,
    samples: int,
    device: torch.device,
    *,
    forward_only: bool,
) -> float:
    """Megatron's pipeline schedule over the microbatches of one global batch; the mean loss over all its tokens."""
    dp_size = parallel_state.get_data_parallel_world_size()
    sums = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=_batches(text, args, samples, device),
        model=[trainee.model],
        num_microbatches=args.global_batch_size // (args.micro_batch_size * dp_size),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    total = torch.zeros(2, dtype=torch.float64, device=device)
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        for loss_sum, num_tokens in sums:
            total += torch.stack([loss_sum.double(), num_tokens.double()])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _batches(text: PackedText, args: argparse.Namespace, samples: int, device: torch.device):
    """This rank's microbatches: tokens, labels, loss_mask, position_ids, each [micro_batch_size, seq_length / cp]."""
    place = {
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "dp_size": parallel_state.get_data_parallel_world_size(),
    }
    sizes = {"micro_batch_size": args.micro_batch_size, "global_batch_size": args.global_batch_size}
    for indices in microbatch_indices(samples, **sizes, **place):
        rows = torch.from_numpy(text.batch(indices)).to(device)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        positions = torch.arange(args.seq_length, device=device).expand_as(tokens).contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=device)
        whole = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        yield get_batch_on_this_cp_rank(whole)


def _forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, functools.partial(_loss_func, batch["loss_mask"])


def _loss_func(loss_mask: torch.Tensor, losses: torch.Tensor):
    """(sum to differentiate, number of tokens, what is reported), of this rank's share of a microbatch."""
    total = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum()
    return total, num_tokens.to(torch.int), (total.detach(), num_tokens)


def _introduce(
    reporter: Reporter, args: argparse.Namespace, corpus: Corpus, trainee: Trainee, device: torch.device
) -> None:
    sizes = {
        "ranks": dist.get_world_size(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
        "parameters_on_rank_0": sum(p.numel() for p in trainee.model.parameters()),
        "documents": corpus.num_documents,
        "train_tokens": int(corpus.train.tokens.size),
    }
    attention = " ".join(args.cp_comm_type) if args.context_parallel_size > 1 else "Megatron's own attention"
    if args.grid and args.context_parallel_size > 1:
        attention += " {}x{}".format(*args.grid)
    title = f"{sizes['ranks']} ranks, context parallel {args.context_parallel_size}: {attention}"
    versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
    reporter.header(title=title, device=str(device), options=vars(args), versions=versions, **sizes)
    reporter.say(
        f"{title}; data parallel {sizes['data_parallel_size']}, "
        f"{sizes['parameters_on_rank_0']:,} parameters on rank 0, "
        f"{sizes['documents']:,} documents, {sizes['train_tokens']:,} tokens, byte unigram loss {reporter.unigram:.4f}"
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
