"""Layers whose queries select keys by an index: Megatron's DSA (`experimental_attention_variant="dsa"`).

Its indexer projects tokens to index queries, weights and index keys; then it scores all keys of the rank. Ours takes
what it has projected. It was read in the releases of `READ`: 0.16 has no method that ends there; from 0.19 on the layer
takes the latents of MLA without their up-projection, and sums the indexer's loss where losses are per token.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor, nn

from ....core import comm
from .release import UnsupportedMegatronError, lookup, megatron_version

READ = ("0.16", "0.17", "0.18", "0.19", "0.20")
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"

OFF = {
    "softmax_type": ("vanilla",),
    "window_size": (None,),
    "qk_clip": (False,),
    "log_max_attention_logit": (False,),
    "dsa_indexer_topk_freq": (1, None),
    "dsa_indexer_scoring_relu": (True,),
}
"""Options that Megatron's DSA does not read, then those that ours does not have, and the values that they may have."""


def is_indexed(module: Any) -> bool:
    """Whether a module is Megatron's core attention to the keys that an index selects.

    Raises: UnsupportedMegatronError for a release whose DSA was not read.
    """
    if getattr(module, "__module__", None) != _DSA or getattr(module, "__qualname__", None) != "DSAttention":
        return False
    if not megatron_version().startswith(tuple(f"{release}." for release in READ)):
        raise UnsupportedMegatronError(
            f"megatron-core {megatron_version()}: its DSAttention is not known to compute what it does in "
            f"{', '.join(READ)}, so it can't run on shards of a sequence: use one of these releases"
        )
    return True


def refuse_indexed(config: Any) -> None:
    """Raise a ValueError for options with which DSA with a tree would not be what the user expects."""
    for name, off in OFF.items():
        if (value := getattr(config, name, off[0])) not in off:
            raise ValueError(
                f"{name}={value!r} in a layer with DSA (experimental_attention_variant='dsa'), which has no such "
                f"option with a tree: set it to {off[0]!r}"
            )
    recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
    attention = lookup("megatron.core.transformer.attention:Attention")
    passed = inspect.signature(attention._checkpointed_attention_forward).parameters
    if recomputes and "core_attention_extra_kwargs" not in passed:
        raise ValueError(
            "recompute_modules has 'core_attn', for which Megatron (up to 0.18) does not pass DSA its tokens: leave it "
            "out, or recompute whole layers (recompute_granularity='full')"
        )


class _Projected(NamedTuple):
    """What stands in for the scores of all keys: of these the indexer only takes the largest."""

    q: Tensor
    weights: Tensor
    k: Tensor

    def topk(self, *_: Any, **__: Any) -> tuple[None, _Projected]:
        return None, self


def project_index(indexer: nn.Module, x: Tensor, qr: Tensor, positions: Tensor, length: int) -> tuple[Tensor, ...]:
    """Index queries [s, b, h, d], their weights [s, b, h] and index keys [s, b, d] of this rank's tokens.

    Args:
        x: [s, b, hidden], qr: [s, b, r]; with sequence parallelism shards of these.
        positions: int64 [s], of the tokens, for the rotary embedding; less than length.
    """
    with _rotated_at(indexer.rotary_pos_emb, positions, length):
        if hasattr(indexer, "forward_before_topk"):
            q, k, weights = indexer.forward_before_topk(x, qr)
            return q, weights, k
        with mock.patch.object(indexer, "_compute_index_scores", _Projected):
            return indexer.forward_with_scores(x, qr)[1]


@contextlib.contextmanager
def _rotated_at(embedding: nn.Module, positions: Tensor, length: int):
    """While an indexer runs: its rotary embedding's table has the rows of these positions."""
    whole = embedding(length, packed_seq=True)  # not cut for the ranks
    table, *scale = whole if isinstance(whole, tuple) else (whole,)
    rows = table[positions]

    def forward(*_: Any, **__: Any) -> Any:
        return (rows, *scale) if scale else rows

    with mock.patch.object(embedding, "forward", forward):
        yield


def attach_index_loss(
    out: Tensor, divergence: Tensor, *, coeff: float, count: int, layer_number: int, config: Any, cp_group: Any
) -> Tensor:
    """out, whose backward adds the gradient of the indexer's loss, which is noted for Megatron's log.

    Megatron's loss is a mean over tokens, from 0.19 on a sum where losses are per token. What each rank contributes
    here adds up, after all that Megatron does to gradients, to what one rank has: they are summed over the ranks of a
    sequence, or averaged (not `calculate_per_token_loss`), for which from 0.19 on the schedules make up.

    Args:
        divergence: the sum over this rank's queries. count: queries of all ranks of the batch.
        cp_group: those ranks.
    """
    world, per_token, loss = comm.group_size(cp_group), config.calculate_per_token_loss, divergence * coeff
    newer = _sums_per_token()
    if not (newer and per_token):
        loss = loss / count
    logged = loss.detach()
    if not per_token:
        loss = loss * (world / config.context_parallel_size if newer else world)
    elif not newer:
        loss = loss * (world / config.context_parallel_size)
    log = lookup(f"{_DSA}:DSAIndexerLossLoggingHelper")
    log.save_loss_to_tracker(logged, layer_number, config.num_layers, reduce_group=cp_group)
    return lookup(f"{_DSA}:DSAIndexerLossAutoScaler").apply(out, loss)


def index_epsilon() -> float:
    """What Megatron adds to probabilities before their logarithm in the indexer's loss: from 0.19 on nothing."""
    return 0.0 if _sums_per_token() else 1e-10


def _sums_per_token() -> bool:
    return "calculate_per_token_loss" in inspect.signature(lookup(f"{_DSA}:compute_dsa_indexer_loss")).parameters
