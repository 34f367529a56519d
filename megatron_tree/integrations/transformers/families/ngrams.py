"""Embeddings of n-grams and the convolutions behind them (Qwen4-Exp's `ple` layers), over tokens that ranks share.

Such a layer computes across tokens in two places: n-grams of a few token ids, and a dilated convolution. On ranks both
get the rows before each of their segments (`tree_convolution`). Their states are two more convolution states of the
layer's cache: the last ids, and the convolution's last inputs.
"""

from __future__ import annotations

import functools

from torch import Tensor, nn

from ....comm import outside_graphs
from ....recurrence.halo import tree_convolution
from ..train.batch_shards import SequenceShard, current_shard
from .recurrent_prefill import current_pass

CONVOLUTION, IDS = 1, 2
"""Numbers of the states in the cache."""


def share_ngrams(embedding: type[nn.Module], layer: type[nn.Module]) -> None:
    """Let these classes' modules compute over shards where the model's tokens are shared; done once."""
    if not hasattr(embedding.forward, "of_tree"):
        embedding.forward = _sharing(embedding.forward, _ngrams)
        layer._short_conv = _sharing(layer._short_conv, _convolution)


def _sharing(original, adapter):
    @outside_graphs
    @functools.wraps(original)
    def call(module, x: Tensor, past_key_values):
        options = _options(current_shard.get())
        if options is None:
            return original(module, x, past_key_values)
        return adapter(functools.partial(original, module), module, x, past_key_values, options)

    call.of_tree = True
    return call


def _options(shard: SequenceShard | None) -> dict | None:
    """Those of `tree_convolution` in a run whose tokens ranks share; None in others."""
    if shard is not None:
        layout = "zigzag" if shard.documents is None else shard.documents
        return {"cp_group": shard.cp_group, "layout": layout, "config": shard.config}
    of_pass = current_pass.get()
    return of_pass.options if of_pass is not None and of_pass.is_sharded else None


def _ngrams(original, module, ids: Tensor, cache, options: dict) -> Tensor:
    """Of ids [b, s_local]. Before a sequence are ids eos, which are zeros here."""
    eos, count = module.eos_token_id, module.context_len
    before = None if cache is None else cache.get_conv_state(module.layer_idx, state_idx=IDS)
    out, final = tree_convolution(
        lambda x: original(x + eos, None),
        ids - eos,
        count,
        before=None if before is None else before - eos,
        return_final=cache is not None,
        **options,
    )
    if cache is not None:
        cache.update_conv_state(final + eos, module.layer_idx, state_idx=IDS, conv_kernel_size=count)
    return out


def _convolution(original, module, x: Tensor, cache, options: dict) -> Tensor:
    """Of x [b, s_local, c]."""
    count = module.short_conv_state_len
    before = None if cache is None else cache.get_conv_state(module.layer_idx, state_idx=CONVOLUTION)
    out, final = tree_convolution(
        lambda x: original(x, None),
        x,
        count,
        before=None if before is None else before.transpose(1, 2),
        return_final=cache is not None,
        **options,
    )
    if cache is not None:
        last = final.transpose(1, 2)
        cache.update_conv_state(last, module.layer_idx, state_idx=CONVOLUTION, conv_kernel_size=count)
    return out
