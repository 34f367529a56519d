"""The losses of training on shards: the mean cross entropy over the tokens of all ranks, or values of every token.

`loss_over_all_ranks` takes the place of a model's loss function. For other losses, of reinforcement learning, it gives
the log-probabilities of a shard's labels, and what else they read for every token:

    values = token_log_probs(model, shard, entropy=True)          # of parallel.shard_batch(batch)
    log_probs = gather_tokens(values.log_probs, shard)            # [b, s] of the whole batch, on every rank
    loss = any_loss(log_probs, ...)                               # the same on the ranks of a sequence group
    loss.backward()                                               # then average the gradients over all ranks

No rank ever holds the logits [b, s / p, vocab]: they are computed for some tokens at a time, and again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transformers import PreTrainedModel

from ....core.arguments import checked
from ....core.attention.sequences import shard_sequence, unshard_sequence
from ....core.comm import Ranks, check_local, group_size, outside_graphs
from .batch_shards import IGNORED, SequenceShard
from .token_tiles import DeferredLogits, default_tile, rows_in_tiles


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
    If the shard asks for values of its tokens (`TokenValues`) these are returned, and nothing is sent.
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
    each = logits.for_tokens(losses, labels) if deferred else losses(logits.flatten(0, -2), labels)
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


class LogProbs(NamedTuple):
    """Of every token, [b, s / p]: fp32, or float64 of a model in float64; 0 where the label is -100.

    Token i's are those of its label, which in a batch from `shard_batch` is the next token.
    """

    log_probs: Tensor
    entropies: Tensor | None


@dataclass(frozen=True, kw_only=True)
class TokenValues:
    """What the loss function of a model returns for each token instead of a mean; `SequenceShard.token_values`."""

    names: tuple[str, ...]
    """The values, from `VALUES`."""
    temperature: float = 1.0
    tile: int | None = None
    """Tokens whose logits are computed at a time."""

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature!r} must be positive")
        if self.tile is not None and (type(self.tile) is not int or self.tile < 1):
            raise ValueError(f"tile={self.tile!r} must be a positive number of tokens")

    def __call__(self, logits: Tensor | DeferredLogits, labels: Tensor) -> Tensor:
        """[b, s, values] of logits [b, s, vocab] and labels [b, s]."""
        if isinstance(logits, DeferredLogits):
            return logits.for_tokens(self.for_tile, labels.flatten()).unflatten(0, labels.shape)
        tile = default_tile(logits.shape[-1])
        if self.tile is not None and labels.numel() > self.tile:
            raise ValueError(f"tile={self.tile}: the model computes its logits whole, as loss_tile=0 or its head says")
        return rows_in_tiles(self.for_tile, (logits.flatten(0, -2), labels.flatten()), [], tile).unflatten(
            0, labels.shape
        )

    def for_tile(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[n, values] of logits [n, vocab] and labels [n]."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        normalised = logits.log_softmax(-1)
        values = [VALUES[name](normalised, logits, labels.clamp(min=0)) for name in self.names]
        return torch.stack(values, -1).masked_fill((labels == IGNORED)[:, None], 0)


def _log_probs(log_probs: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    return log_probs.gather(-1, labels[:, None])[:, 0]


def _entropies(log_probs: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # words that a head excludes have -inf
    return -(log_probs.exp() * finite).sum(-1)


VALUES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "log_probs": _log_probs,
    "entropies": _entropies,
    # for metrics, without gradients
    "mean_logits": lambda log_probs, logits, labels: logits.detach().mean(-1),
    "log_sum_sq_probs": lambda log_probs, logits, labels: (2 * log_probs.detach()).logsumexp(-1),
    "is_top1": lambda log_probs, logits, labels: (logits.detach().argmax(-1) == labels).to(logits.dtype),
}


@checked
def log_probs_of_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    change: Callable[[Tensor], Tensor] | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    tile: int | None = None,
) -> LogProbs:
    """Log-probabilities of labels under softmax(change(hidden @ weight.T + bias) / temperature). No communication.

    Args:
        hidden: [..., d]; weight: [vocab, d]; bias: [vocab]; labels int64 [...], -100 for tokens without one.
        change: what the model does with its logits: `lambda x: cap * torch.tanh(x / cap)` for a softcap.
        entropy: return the entropies of the distributions, too.
        tile: tokens whose logits are computed at a time; default: as many as give 256 MiB.
    Returns: values of the shape of labels; differentiable once.
    """
    check_local(hidden=hidden, weight=weight, labels=labels, bias=bias)
    fits = hidden.dim() > 1 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels {list(labels.shape)}"
        raise ValueError(f"{shapes}, {labels.dtype}: they must be [..., d], [vocab, d] and int64 [...]")
    wanted = TokenValues(names=_names(entropy), temperature=temperature, tile=tile)

    def for_tile(rows: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(rows, weight, bias)
        return wanted.for_tile(logits if change is None else change(logits), labels)

    parameters = [weight] if bias is None else [weight, bias]
    rows = hidden.flatten(0, -2), labels.flatten()
    return _named(
        rows_in_tiles(for_tile, rows, parameters, tile or default_tile(len(weight))).unflatten(0, labels.shape)
    )


@checked
def token_log_probs(
    model: Callable, shard: Mapping, *, temperature: float = 1.0, entropy: bool = False, tile: int | None = None
) -> LogProbs:
    """Log-probabilities of a shard's labels, [b, s / p] of this rank's tokens. Collective, as the model's forward.

    Args:
        model: one that trains on shards, or what wraps it (DDP, FSDP2, a DeepSpeed engine, a PeftModel).
        shard: from `shard_batch`, with labels.
        temperature, entropy, tile: see `log_probs_of_hidden`. The logits are those after the model's softcap and scale.
    Raises: ValueError for a shard without labels and, if a tile is given, a model whose logits can't be tiled.
    """
    return _named(token_values(model, shard, TokenValues(names=_names(entropy), temperature=temperature, tile=tile)))


def token_values(model, shard: dict, wanted: TokenValues) -> Tensor:
    """[b, s / p, values] of this rank's tokens, as `token_log_probs`."""
    return model(**asking(shard, wanted)).loss


def asking(shard: dict, wanted: TokenValues) -> dict:
    """The shard, for which the model's loss is a tensor of the values of every token."""
    about = _about(shard)
    if shard.get("labels") is None:
        raise ValueError(
            f"the shard has {sorted(shard)} and no labels: give shard_batch labels, -100 where none is wanted"
        )
    return shard | {"sequence_shard": about.changed(token_values=wanted)}


def _about(shard: Mapping) -> SequenceShard:
    if not isinstance(about := shard.get("sequence_shard"), SequenceShard):
        raise ValueError(f"shard has {sorted(shard)} and no sequence_shard: pass what shard_batch returned")
    return about


@checked
def gather_tokens(x: Tensor, shard: Mapping) -> Tensor:
    """The values of all tokens of the batch, on every rank that shares its sequences. One all-gather.

    x: [b, s / p, ...] (packed: [1, t / p, ...]), of this rank's tokens; shard: from `shard_batch`.
    Returns [b, s, ...], in the order of the batch that was given to `shard_batch`.
    Differentiable once: a loss of the result, which every rank of the sequence group computes alike, has gradients that
    are right when parameters' gradients are *averaged* over all ranks, as DDP, FSDP2 and DeepSpeed do.
    """
    return _GatherTokens.apply(x, _about(shard))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        whole = unshard_sequence(x, shard.cp_group, 1, _layout(shard))
        if shard.documents is not None:
            return whole[0].unflatten(0, shard.whole_shape)
        return whole[:, : shard.whole_shape[1]].contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        shard = ctx.shard
        ranks = group_size(shard.cp_group)
        if shard.documents is not None:
            grad = grad.flatten(0, 1)[None]
        else:
            added = shard.num_tokens * ranks - grad.shape[1]
            grad = torch.cat((grad, grad.new_zeros(len(grad), added, *grad.shape[2:])), 1)
        return shard_sequence(grad, shard.cp_group, 1, _layout(shard)) * ranks, None


def _layout(shard: SequenceShard):
    if shard.documents is not None:
        return shard.documents
    return "zigzag" if group_size(shard.cp_group) > 1 else "contiguous"


def _names(entropy: bool) -> tuple[str, ...]:
    return ("log_probs", "entropies") if entropy else ("log_probs",)


def _named(values: Tensor) -> LogProbs:
    return LogProbs(values[..., 0], values[..., 1] if values.shape[-1] > 1 else None)
