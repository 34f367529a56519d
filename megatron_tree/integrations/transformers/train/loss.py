"""The loss of training on shards: the mean cross entropy over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from transformers import PreTrainedModel

from ....comm import Ranks, outside_graphs
from .token_tiles import IGNORED, DeferredLogits


class _MeanOverRanks(torch.autograd.Function):
    """Sum of total / sum of count over all ranks, and the factor of its gradient, which is that of this rank's total,
    times the number of ranks.

    count_of_all: what to divide by, if it is not the sum.
    """

    @staticmethod
    def forward(total: Tensor, count: Tensor, count_of_all, ranks: Ranks) -> tuple[Tensor, Tensor]:
        sums = torch.stack((total.double(), count.double()))
        total_of_all, counted = ranks.reduce(sums)
        count_of_all = counted if count_of_all is None else torch.as_tensor(count_of_all, device=total.device)
        count_of_all = torch.where(count_of_all != 0, count_of_all, 1)  # weights may add up to less than 1
        return (total_of_all / count_of_all).to(total.dtype), (ranks.size / count_of_all).to(total.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *_, ctx.ranks = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    @outside_graphs
    def backward(ctx, grad: Tensor, _):
        ctx.ranks.meet("the backward of the loss")  # before DDP sums gradients up
        (scale,) = ctx.saved_tensors
        return grad * scale, None, None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_):
        (scale,) = ctx.saved_tensors
        return ctx.ranks.reduce(tangent.clone()) * scale / ctx.ranks.size, None


@outside_graphs
def loss_over_all_ranks(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    plain_loss=None,
    sequence_shard=None,
    num_items_in_batch=None,
    label_smoothing: float = 0.0,
    **kwargs,
) -> Tensor:
    """The cross entropy's mean over the tokens of all ranks that have a label. Collective over shard.loss_group.

    logits [b, s / p, vocab], or `DeferredLogits`; labels int64 [b, s / p], shifted as `shard_batch` does it.
    Returns fp32, the same on every rank.
    num_items_in_batch: what to divide by instead, if one step has several batches: tokens of all of them with a label.
        The tokens of a prefix tree count by their weights.
    plain_loss: the model's own loss, for evaluation of batches that are not from `shard_batch`.
    label_smoothing: the weight of the uniform distribution in the targets.
    If the shard asks for values of its tokens (log_probs.py) these are returned, and nothing is sent.
    """
    if sequence_shard is None:
        options = {"vocab_size": vocab_size, "num_items_in_batch": num_items_in_batch}
        return plain_loss(logits, labels, **options, **kwargs)
    if sequence_shard.token_values is not None:
        sequence_shard.used_by["loss"] = None
        return sequence_shard.token_values(logits, labels)
    labels = labels.flatten()

    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        options = {"ignore_index": IGNORED, "label_smoothing": label_smoothing}
        return F.cross_entropy(logits.float(), labels, reduction="none", **options)

    deferred = isinstance(logits, DeferredLogits)
    each = logits.of_tokens(losses, labels) if deferred else losses(logits.flatten(0, -2), labels)
    weights = sequence_shard.weights
    total = each.sum() if weights is None else (each * weights.flatten()).sum()
    ranks = Ranks.of(sequence_shard.loss_group, total.device, sequence_shard.config)
    count = (labels != IGNORED).sum() if weights is None else weights.sum()
    loss = _MeanOverRanks.apply(total, count, num_items_in_batch, ranks)[0]
    sequence_shard.used_by["loss"] = None
    return loss


def check_loss(model: PreTrainedModel, expected: Callable, router_logits: bool | None = None) -> None:
    """Raise ``ValueError`` for a model whose loss is another one than `expected`, its loss_function.

    router_logits: of the call; None: the configuration's.
    """
    if router_logits is None:
        router_logits = getattr(model.config.get_text_config(decoder=True), "output_router_logits", False)
    if router_logits:
        raise ValueError(
            "output_router_logits=True: the routers' loss is not a sum over tokens; set it to False in the model's "
            "configuration, and leave it out of calls (TRL's SFTTrainer: router_aux_loss_coef=0)"
        )
    if model.loss_function is not expected:
        raise ValueError(
            f"the loss_function of {type(model).__name__} is {model.loss_function!r}: on shards the loss is the mean "
            "cross entropy of all ranks' tokens. Leave loss_function as it is or, for another loss, compute it from "
            "the shard's logits in a loop of your own"
        )
