"""One step of training or validation: this rank's microbatches through Megatron's pipeline schedule."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ..integrations.megatron.compat import batch_on_this_cp_rank
from .data import PackedText, microbatch_indices
from .model import Trainee


def train_step(
    trainee: Trainee, text: PackedText, args: argparse.Namespace, samples: int, device: torch.device, stopping: bool
) -> tuple[dict[str, float | None], bool]:
    """One optimizer step on the global batch that starts at sample number `samples`. All ranks call it.

    Args: stopping: whether this rank has been asked to stop.
    Returns: ({loss: mean over the tokens of the batch, in nats; grad_norm: before clipping; lr}, whether any rank has
        been asked to stop); equal on all ranks.
    Raises: RuntimeError if a gradient is infinite or NaN.
    """
    trainee.model.train()
    trainee.model.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    loss, stopping = _run_schedule(trainee, text, args, samples, device, forward_only=False, stopping=stopping)
    lr = max(group["lr"] for group in trainee.optimizer.param_groups)
    succeeded, grad_norm, _ = trainee.optimizer.step()
    if not succeeded:
        raise RuntimeError("the optimizer refused the step: a gradient is infinite or NaN")
    trainee.scheduler.step(increment=args.global_batch_size)
    return {"loss": loss, "grad_norm": None if grad_norm is None else float(grad_norm), "lr": lr}, stopping


@torch.no_grad()
def evaluate(trainee: Trainee, text: PackedText, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over the first `eval_iters` global batches of the held-out samples. All ranks call it."""
    trainee.model.eval()
    starts = range(0, args.eval_iters * args.global_batch_size, args.global_batch_size)
    losses = [_run_schedule(trainee, text, args, start, device, forward_only=True)[0] for start in starts]
    return sum(losses) / len(losses)


def _run_schedule(trainee, text, args, samples, device, *, forward_only, stopping=False) -> tuple[float, bool]:
    """All microbatches of one global batch. Returns: (mean loss over all its tokens, whether any rank is stopping)."""
    num_microbatches = args.global_batch_size // (args.micro_batch_size * parallel_state.get_data_parallel_world_size())
    sums = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=_batches(text, args, samples, device),
        model=[trainee.model],
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    total = torch.zeros(3, dtype=torch.float64, device=device)  # loss, tokens, ranks that were asked to stop
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
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
