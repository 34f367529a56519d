"""The attention function and the mask function that Transformers calls as "tree".

Training on sharded sequences is in training.py. For inference two phases share one cache. In the prefill
of `Runner` (runner.py) a rank runs its own tokens of a chunk, and their queries meet the keys of all ranks
(`tree_prefill`). In all other calls the new tokens are replicated, each rank keeps the keys and values that it owns,
and partial attention over the shards is merged (`tree_decode`). `model.generate(..., past_key_values=cache)` uses the
latter for the prompt, too, and works with left padding.

How attention finds the cache: Transformers passes the attention function the module, q, k, v and the mask, not the
cache: a model calls ``past_key_values.update(k, v, layer_idx)`` and then the attention function, in one thread, with
the keys and values that the update returned (with latent attention latents and rotary keys, see latent.py). So the
update leaves a note in a context variable, and the attention call takes it. A note with other keys or values than those
of the call, one that nobody takes, and a second call for the same note are errors, never a guess.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

from transformers import AttentionInterface, PreTrainedModel

from ...attention.decode import tree_decode
from ...attention.functional import tree_attn_func
from ...comm import collective_call, outside_graphs
from ...config import AttnSlice, default_config
from .architectures import CHUNKED, WINDOW_IN_MASK, check_replaceable
from .cache import TreeCache
from .latent import latent_heads
from .layers import TreeCacheLayer
from .llama4 import chunk_size, with_own_temperature
from .replaced_attention import replace_own_code
from .runs import Update, current_run, forget_notes, last_update
from .training import SequenceShard, attend_to_shard, current_shard

__all__ = [
    "TreeCache",
    "TreeCacheLayer",
    "agree_on_prompt",
    "check_model",
    "tree_attention",
    "tree_mask",
]

NOTHING_BESIDE = "a batch from shard_batch takes neither a cache nor an attention_mask of its own"
UNSUPPORTED = {"position_bias", "alibi", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions"}


@outside_graphs
def tree_attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention function registered as "tree"; Transformers calls it once per layer.

    Args:
        query: [b, h, s, d]; key, value: [b, h_kv, n, d], what the cache's update returned (or the new ones, no cache).
        attention_mask: what `tree_mask` returned: None, bool [b, slots], or the shard of a batch that is trained on.
        sliding_window: keys that a query sees, itself included. softcap, s_aux: as `softcap` and `sinks` elsewhere.
        alibi_slopes: see `tree_attn_func`; of the models in replaced_attention.py.
    Returns: ([b, s, h, d_v], None): there are no attention weights.
    Raises: ValueError for anything that exact causal attention over a sharded cache does not support.
    """
    update, running = last_update.get(), current_run.get()
    forget_notes()  # if this call fails, the run is over
    shard = attention_mask if isinstance(attention_mask, SequenceShard) else None
    # of the class: reading an attribute of a configuration takes some function calls
    if sliding_window is None and getattr(type(getattr(module, "config", None)), "model_type", None) in WINDOW_IN_MASK:
        sliding_window = module.config.sliding_window
    if shard is None:
        _check_plain(module, attention_mask, dropout)
    _check_call(module, sliding_window, kwargs)
    options = {
        "softmax_scale": scaling,
        "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "alibi_slopes": alibi_slopes,
    }
    q = query.transpose(1, 2)
    if shard is not None:
        if update is not None:
            raise ValueError(NOTHING_BESIDE)
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        return attend_to_shard(module, q, k, v, shard=shard, dropout=dropout, options=options).contiguous(), None
    shares = getattr(module, "head_shares", None)  # set where a model's weights are split over ranks
    if shares != (None if update is None else update.cache.head_shares):
        cache = (
            "no cache is given" if update is None else f"the cache is one for head_shares={update.cache.head_shares}"
        )
        raise ValueError(
            f"{type(module).__name__}: the model's ranks have head_shares={shares}, but {cache}. A model whose weights "
            "are split needs a cache from its engine's new_cache(), and other models a TreeCache without head_shares"
        )
    if update is None:
        _check_not_running(module, running)
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        return _attention_without_cache(module, q, k, v, attention_mask, options).contiguous(), None
    _check_update(module, key, value, update)
    layer_idx = update.layer_idx
    if sliding_window != update.cache.window(layer_idx):
        raise ValueError(
            f"{type(module).__name__} (layer_idx={layer_idx}) attends with sliding_window={sliding_window}, but its "
            f"configuration gives the cache {update.cache.window(layer_idx)}: tokens that it needs may be gone. Use "
            "attn_implementation='sdpa' for this model, and Transformers' own cache"
        )
    cache, chunk = update.cache, chunk_size(module)
    if chunk is not None:
        options["attention_chunk_size"] = chunk
    q = with_own_temperature(module, q, update.forward)
    latent = latent_heads(module) if cache.latent else None
    out = update.forward.attend(
        cache.slot_of[layer_idx], q, latent=latent, visible=attention_mask, config=cache.tree_config, **options
    )
    cache.end_layer()
    return out.contiguous(), None  # some models view it


def _check_update(module, key: Tensor, value: Tensor, update: Update) -> None:
    """Raise ``ValueError`` unless a layer attends to what the last cache update returned."""
    layer_idx = getattr(module, "layer_idx", None)
    if not (_is_same(key, update.keys) and _is_same(value, update.values)):
        raise ValueError(
            f"{type(module).__name__} (layer_idx={layer_idx}) attends to {key.shape[2]} keys {list(key.shape)}, but "
            f"the last cache update was one of layer {update.layer_idx} with {update.keys.shape[2]} keys "
            f"{list(update.keys.shape)}: this model does not pass what the cache returns on to the attention "
            "function. Use attn_implementation='sdpa' for it, and its own cache"
        )


def _is_same(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.shape == y.shape and (x.data_ptr() == y.data_ptr() or torch.equal(x, y)))


def _check_not_running(module, running: TreeCache | None) -> None:
    """Raise ``ValueError`` for an attention call without an update, in the middle of a run over a cache."""
    if running is not None:
        raise ValueError(
            f"{type(module).__name__} (layer_idx={getattr(module, 'layer_idx', None)}) attends without a cache update "
            "of its own, in the middle of a run over a TreeCache: it attends twice, or shares another layer's keys. "
            "Use attn_implementation='sdpa' for this model, and its own cache. (Gradient checkpointing leaves the "
            "cache out while a model is in training mode: call model.eval(). After a run that failed, call "
            "cache.reset() or crop before the model runs without the cache.)"
        )


def _attention_without_cache(module, q: Tensor, k: Tensor, v: Tensor, attention_mask, options: dict) -> Tensor:
    """Plain causal attention on this rank: a forward pass with use_cache=False."""
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{type(module).__name__} attends to {k.shape[1]} keys with {q.shape[1]} queries without having updated a "
            "TreeCache. attn_implementation='tree' works with past_key_values=TreeCache(model.config, ...) or with "
            "use_cache=False; Transformers' own caches and layers that share keys and values are not supported"
        )
    if (chunk := chunk_size(module)) is not None:
        if attention_mask is not None:
            raise ValueError(
                f"{type(module).__name__}: attention_mask with padding in chunked layers needs a TreeCache"
            )
        n = q.shape[1]
        spans = [(i, min(i + chunk, n)) for i in range(0, n, chunk)]
        ranges = [AttnSlice(span, span, "causal") for span in spans]
        return tree_attn_func(q, k, v, cp_group=None, ranges=ranges, layout="contiguous", **options)
    if attention_mask is None:
        return tree_attn_func(q, k, v, cp_group=None, causal=True, layout="contiguous", **options)
    if torch.is_grad_enabled() and q.requires_grad:
        raise ValueError(
            "attention_mask with padding is not differentiable with attn_implementation='tree': pad on the right, mask "
            "the labels and leave attention_mask out, or use attn_implementation='sdpa'"
        )
    slots = torch.arange(k.shape[1], device=k.device)
    return tree_decode(
        q, k, v, cp_group=None, q_positions=slots, cache_positions=torch.where(attention_mask, slots, -1), **options
    )


def _check_call(module, sliding_window: int | None, kwargs: dict) -> None:
    name = type(module).__name__
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(
            f"{name} asks for attention without a causal mask; attn_implementation='tree' is causal. Where this is the "
            "vision part of a model, give each part its own: "
            'model.set_attn_implementation({"text_config": "tree", "vision_config": "sdpa"})'
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{name}: sliding_window={sliding_window} must be 1 or more, or None for no window")
    for option in UNSUPPORTED & kwargs.keys():
        if kwargs[option] is not None and kwargs[option] is not False:
            raise ValueError(f"{name}: {option} is not supported with attn_implementation='tree'; use 'eager'")


def _check_plain(module, attention_mask, dropout: float) -> None:
    """Of a call without a shard."""
    if dropout:
        raise ValueError(
            f"{type(module).__name__}: attention dropout={dropout} is not supported: call model.eval() or set it to 0"
        )
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2):
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask {shape}: attn_implementation='tree' takes [batch, slots] with 0 for padding (or none), "
            "not a mask of queries by keys"
        )


@outside_graphs
def tree_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config=None,
    **kwargs,
) -> Tensor | SequenceShard | None:
    """The mask function registered as "tree": the padding mask, bool [b, kv_length], or None without padding.

    While a model trains on shards it is the batch's `SequenceShard`: every model hands its mask on to the attention of
    all layers, also when a layer is recomputed in the backward.

    The attention function applies causality and the window. Transformers reports any other mask (packed
    sequences, bidirectional parts, functions given by the user) by allow_is_causal_skip=False or use_vmap=True.
    """
    chunked = getattr(config, "attention_chunk_size", None) and config.model_type not in CHUNKED
    if not allow_is_causal_skip or use_vmap or chunked:
        raise ValueError(
            f"{type(config).__name__} asks for a mask that is more than causal, sliding window and padding (packed "
            "sequences, chunked or bidirectional attention); attn_implementation='tree' does not support it. Use 'sdpa'"
        )
    if attention_mask is None:
        return current_shard.get()
    if attention_mask.shape != (batch_size, kv_length):
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} must be [batch, slots] = [{batch_size}, {kv_length}]: one "
            f"entry for each of the {kv_length - q_length} cached and {q_length} new tokens"
        )
    if attention_mask.all():
        return current_shard.get()
    if current_shard.get() is not None:
        raise ValueError(NOTHING_BESIDE)
    return attention_mask


def agree_on_prompt(cache: TreeCache, input_ids: Tensor, what: str, **options) -> None:
    """Raise the same ``ValueError`` on all ranks of the cache's group unless they hold the same prompt."""
    config = cache.tree_config or default_config()
    digest = hashlib.sha256(input_ids.cpu().numpy().tobytes()).hexdigest()[:16] if cache.world > 1 else ""
    values = {"input_ids": input_ids.shape, "digest of input_ids": digest, "cached": cache.get_seq_length(), **options}
    with collective_call(what, cache.cp_group, config) as call:
        call.agree(**values)


def check_model(model) -> None:
    """Raise ``ValueError`` unless it is a Transformers model whose attention implementation is "tree"."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}: pass the Transformers model itself (PreTrainedModel), not a wrapper "
            "such as torch.compile's or PEFT's (its get_base_model() has the adapters)"
        )
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if name != "tree":
        raise ValueError(f"the model's attn_implementation is {name!r}: call model.set_attn_implementation('tree')")
    check_replaceable(type(model))


AttentionInterface.register("tree", tree_attention)
AttentionMaskInterface.register("tree", tree_mask)
replace_own_code(tree_attention)
