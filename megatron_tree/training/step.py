"""One step of training or validation: this rank's microbatches through Megatron's pipeline schedule."""

from __future__ import annotations

import argparse
import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from ..integrations.megatron.compat import batch_on_this_cp_rank
from .data import Samples, microbatch_indices
from .model import Trainee
from .stop import StopRequest


class StepResult(NamedTuple):
    """What a training step tells, equal on all ranks."""

    loss: float
    """Mean over the global batch's tokens, nats."""
    grad_norm: float | None
    """Before clipping; None if the step was skipped."""
    lr: float
    skipped: bool
    """fp16: a gradient overflowed, so parameters stay and the loss scale falls."""
    stop: bool
    """A rank has been asked to stop (`stop.StopRequest`)."""


def train_step(
    trainee: Trainee,
    data: Samples,
    args: argparse.Namespace,
    samples: int,
    device: torch.device,
    stop: StopRequest,
) -> StepResult:
    """One optimizer step on the global batch that starts at sample number `samples`. All ranks call it.

    Raises: RuntimeError if a gradient is infinite or NaN and no lower loss scale (fp16) can mend it.
    """
    for chunk in trainee.chunks:
        chunk.zero_grad_buffer()
        chunk.train()
    trainee.optimizer.zero_grad()
    loss, stopping = _run_schedule(trainee, data, args, samples, device, stop=stop, forward_only=False)
    lr = max(group["lr"] for group in trainee.optimizer.param_groups)
    succeeded, grad_norm, _ = trainee.optimizer.step()
    if succeeded:
        trainee.scheduler.step(increment=args.global_batch_size)
    elif not args.fp16 or args.loss_scale is not None or trainee.loss_scale() <= args.min_loss_scale:
        raise RuntimeError(
            f"the optimizer refused the step: a gradient is infinite or NaN at loss scale {trainee.loss_scale():g}"
        )
    return StepResult(loss, None if grad_norm is None else float(grad_norm), lr, not succeeded, stopping)


def evaluate(trainee: Trainee, data: Samples, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over the first `eval_iters` global batches of the held-out samples. All ranks call it."""
    for chunk in trainee.chunks:
        chunk.eval()
    with torch.no_grad():
        losses = [
            _run_schedule(trainee, data, args, i * args.global_batch_size, device, forward_only=True)[0]
            for i in range(args.eval_iters)
        ]
    return sum(losses) / len(losses)


def _run_schedule(
    trainee: Trainee,
    data: Samples,
    args: argparse.Namespace,
    samples: int,
    device: torch.device,
    *,
    forward_only: bool,
    stop: StopRequest | None = None,
) -> tuple[float, bool]:
    """All microbatches of one global batch. Returns: (mean loss over all its tokens, whether a rank wants to stop)."""
    dp_size = parallel_state.get_data_parallel_world_size()
    batches = [_batches(data, args, samples, device) for _ in trainee.chunks]
    sums = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=trainee.chunks,
        num_microbatches=args.global_batch_size // (args.micro_batch_size * dp_size),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    total = torch.zeros(3, dtype=torch.float64, device=device)
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        for loss_sum, num_tokens in sums:
            total[:2] += torch.stack([loss_sum.double(), num_tokens.double()])
    total[2] = stop is not None and stop.signal is not None
    dist.all_reduce(total)
    return float(total[0] / total[1]), bool(total[2] > 0)


def _batches(data: Samples, args: argparse.Namespace, samples: int, device: torch.device):
    """This rank's microbatches: tokens, labels, loss_mask, position_ids, each [micro_batch_size, seq_length / cp]."""
    place = {
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "dp_size": parallel_state.get_data_parallel_world_size(),
    }
    sizes = {"micro_batch_size": args.micro_batch_size, "global_batch_size": args.global_batch_size}
    for indices in microbatch_indices(samples, **sizes, **place):
        rows = torch.from_numpy(data.batch(indices)).to(device)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        positions = torch.arange(args.seq_length, device=device).expand_as(tokens).contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=device)
        whole = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        yield batch_on_this_cp_rank(whole)


def _forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, functools.partial(_loss_func, batch["loss_mask"])


def _loss_func(loss_mask: torch.Tensor, losses: torch.Tensor):
    """(sum to differentiate, number of tokens, what is reported), of this rank's share of a microbatch."""
    total = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum()
    return total, num_tokens.to(torch.int), (total.detach(), num_tokens)
