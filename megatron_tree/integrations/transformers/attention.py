"""The attention function and the mask function that Transformers calls as "tree".

Training on sharded sequences is in train/, inference in infer/, and what some models do beside this in families/, whose
table.py lists them. In inference a prefill of `Runner` gives every rank its own tokens of a chunk; in all other calls
every rank runs the new tokens, stores the keys and values that it owns, and partial attention over the shards is
merged. The latter is what `model.generate(..., past_key_values=cache)` does for prompts, too.

How attention finds the cache: a model calls ``past_key_values.update(k, v, layer_idx)`` and then the attention function
with what the update returned, in one thread. So the update leaves a note in a context variable, and the attention call
takes it. A note with other keys or values than those of the call, one that nobody takes, and a second call for the same
note are errors, never a guess.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

from transformers import AttentionInterface, PreTrainedModel

from ...core.attention.decode import tree_decode
from ...core.attention.functional import tree_attn_func
from ...core.comm import outside_graphs
from ...core.spec import AttnSlice
from .architectures import check_replaceable
from .families import compressed, gated_pools
from .families.chunked import chunk_size, has_temperature, with_temperature
from .families.images import ImageMask, image_mask, state_ahead
from .families.indexed import IndexMask
from .families.latent import latent_heads
from .families.pooled import BlockMask, block_mask
from .families.table import BY_MODEL, patch_model
from .infer.cache import TreeCache
from .infer.model_runs import Update, current_run, forget_notes, last_update
from .train.batch_shards import SequenceShard, current_shard
from .train.train_on_shards import attend_to_shard

NOTHING_BESIDE = "a batch from shard_batch takes neither a cache nor an attention_mask of its own"
UNSUPPORTED = {"position_bias", "alibi", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions"}
UNSUPPORTED |= {"block_indices", "sinks"}  # of models that are refused by name


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
    indices: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention function registered as "tree"; Transformers calls it once per layer.

    Args:
        query: [b, h, s, d]; key, value: [b, h_kv, n, d], what the cache's update returned (or the new ones, no cache).
        attention_mask: what `tree_mask` returned: None, bool [b, slots], or the shard of a batch that is trained on.
        sliding_window: keys that a query sees, itself included. softcap, s_aux: as `softcap` and `sinks` elsewhere.
        indices: the keys that an index has selected (families/indexed.py).
    Returns: ([b, s, h, d_v], None): there are no attention weights.
    Raises: ValueError for anything that exact causal attention over a sharded cache does not support.
    """
    update, running = last_update.get(), current_run.get()
    forget_notes()  # if this call fails, the run is over
    if update is None and running is not None:
        update = running.update_read_by(getattr(module, "layer_idx", None))
    # of the class: reading an attribute of a configuration takes some function calls
    family = BY_MODEL.get(getattr(type(getattr(module, "config", None)), "model_type", None))
    if sliding_window is None and family == "window in mask":
        sliding_window = module.config.sliding_window
    _check_call(module, sliding_window, kwargs)
    options = {
        "softmax_scale": scaling,
        "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    if isinstance(attention_mask, BlockMask):
        indices = attention_mask.select(update)
    if family == "gated pools":
        attention_mask, indices = gated_pools.parts_of(module, attention_mask)
    if indices is not None:
        options["selected"] = indices
    if isinstance(attention_mask, IndexMask | BlockMask):
        attention_mask = attention_mask.mask
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if family == "compressed" and update is None:
        return compressed.attend(module, q, k, v, attention_mask, options).contiguous(), None
    if isinstance(attention_mask, SequenceShard):
        if update is not None:
            raise ValueError(NOTHING_BESIDE)
        out = attend_to_shard(module, q, k, v, shard=attention_mask, dropout=dropout, options=options)
        return out.contiguous(), None
    beside = None
    if isinstance(attention_mask, ImageMask):
        _check_images(module, update)
        of_keys = {name: options[name] for name in ("softmax_scale", "softcap")}
        attention_mask, beside = attention_mask.visible, state_ahead(attention_mask, q, k, v, **of_keys)
    _check_plain(module, attention_mask, dropout, update)
    if update is None:
        _check_not_running(module, running)
        return _attention_without_cache(module, q, k, v, attention_mask, options).contiguous(), None
    if family == "compressed":  # its layers' code is known (compressed.READ)
        beside = compressed.state_of_blocks(q, options)
    else:
        _check_update(module, key, value, update, sliding_window)
    cache = update.cache
    forward = update.forward
    if family == "chunked":
        if (chunk := chunk_size(module)) is not None:
            options["attention_chunk_size"] = chunk
        if forward.positions is not None and has_temperature(module):
            q = with_temperature(module, q, forward.positions, max(forward.append.first))
    out = forward.attend(
        cache.slot_of[update.layer_idx],
        q,
        latent=latent_heads(module) if cache.latent else None,
        visible=attention_mask,
        beside=beside,
        config=cache.tree_config,
        **options,
    )
    cache.end_layer()
    return out.contiguous(), None  # some models view it


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


def _check_images(module, update: Update | None) -> None:
    """Raise ``ValueError`` where tokens of an image can't see those that follow."""
    name, shares = type(module).__name__, getattr(module, "head_shares", None)
    if update is None:
        raise ValueError(
            f"{name}: images whose tokens see each other in both directions need a TreeCache with "
            "attn_implementation='tree'; use 'sdpa' without one"
        )
    if shares is not None:
        raise ValueError(
            f"{name}: images whose tokens see each other in both directions can't be run with head_shares={shares}: "
            "use weights='replicated'"
        )


def _check_plain(module, attention_mask, dropout: float, update: Update | None) -> None:
    """Raise ``ValueError`` for what a call without a shard can't have."""
    name = type(module).__name__
    if dropout:
        raise ValueError(f"{name}: attention dropout={dropout} is not supported: call model.eval() or set it to 0")
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2):
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask {shape}: attn_implementation='tree' takes [batch, slots] with 0 for padding (or none), "
            "not a mask of queries by keys"
        )
    shares = vars(module).get("head_shares")  # set where a model's weights are split over ranks
    if shares != (None if update is None else update.cache.head_shares):
        cache = "no cache is given"
        if update is not None:
            cache = f"the cache is one for head_shares={update.cache.head_shares}"
        raise ValueError(
            f"{name}: the model's ranks have head_shares={shares}, but {cache}. A model whose weights are split needs "
            "a cache from its engine's new_cache(), and other models a TreeCache without head_shares"
        )


def _check_update(module, key: Tensor, value: Tensor, update: Update, sliding_window: int | None) -> None:
    """Raise ``ValueError`` unless a layer attends to what the last cache update returned, and to all of its window."""
    is_same = key is update.keys and value is update.values
    is_same = is_same or (_equal(key, update.keys) and _equal(value, update.values))
    if is_same and sliding_window == (held := update.cache.windows[update.layer_idx]):
        return
    name = f"{type(module).__name__} (layer_idx={getattr(module, 'layer_idx', None)})"
    if not is_same:
        raise ValueError(
            f"{name} attends to {key.shape[2]} keys {list(key.shape)}, but the last cache update was one of layer "
            f"{update.layer_idx} with {update.keys.shape[2]} keys {list(update.keys.shape)}: this model does not pass "
            "what the cache returns on to the attention function. Use attn_implementation='sdpa' for it, and its own "
            "cache"
        )
    raise ValueError(
        f"{name} attends with sliding_window={sliding_window}, but its configuration gives the cache {held}: "
        "tokens that it needs may be gone. Use attn_implementation='sdpa' for this model, and Transformers' own "
        "cache"
    )


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and (x.data_ptr() == y.data_ptr() or torch.equal(x, y))


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
    n = q.shape[1]
    if n != k.shape[1]:
        raise ValueError(
            f"{type(module).__name__} attends to {k.shape[1]} keys with {n} queries without having updated a "
            "TreeCache. attn_implementation='tree' works with past_key_values=TreeCache(model.config, ...) or with "
            "use_cache=False; Transformers' own caches and layers that share keys and values are not supported"
        )
    chunk = chunk_size(module)
    if attention_mask is None:
        if chunk is None:
            return tree_attn_func(q, k, v, cp_group=None, causal=True, layout="contiguous", **options)
        spans = [(i, min(i + chunk, n)) for i in range(0, n, chunk)]
        ranges = [AttnSlice(span, span, "causal") for span in spans]
        return tree_attn_func(q, k, v, cp_group=None, ranges=ranges, layout="contiguous", **options)
    if chunk is not None:
        raise ValueError(f"{type(module).__name__}: attention_mask with padding in chunked layers needs a TreeCache")
    if torch.is_grad_enabled() and q.requires_grad:
        raise ValueError(
            "attention_mask with padding is not differentiable with attn_implementation='tree': pad on the right, mask "
            "the labels and leave attention_mask out, or use attn_implementation='sdpa'"
        )
    slots = torch.arange(n, device=k.device)
    return tree_decode(
        q, k, v, cp_group=None, q_positions=slots, cache_positions=torch.where(attention_mask, slots, -1), **options
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
) -> Tensor | SequenceShard | IndexMask | BlockMask | ImageMask | None:
    """The mask function registered as "tree": the padding mask, bool [b, kv_length], or None without padding.

    While a model trains on shards it is the batch's `SequenceShard`: every model hands its mask on to the attention of
    all layers, also when a layer is recomputed in the backward.

    The attention function applies causality and the window. Transformers reports any other mask (packed
    sequences, bidirectional parts, functions given by the user) by allow_is_causal_skip=False or use_vmap=True.
    """
    family = BY_MODEL.get(getattr(config, "model_type", None))
    chunked = getattr(config, "attention_chunk_size", None) and family != "chunked"
    of_images = family == "joined images" and not allow_is_causal_skip
    indexed = family in ("indexed", "pooled")
    if not (allow_is_causal_skip or indexed or of_images) or (use_vmap and not of_images) or chunked:
        raise ValueError(
            f"{type(config).__name__} asks for a mask that is more than causal, sliding window and padding (packed "
            "sequences, chunked or bidirectional attention); attn_implementation='tree' does not support it. Use 'sdpa'"
        )
    mask = _causal_mask(batch_size, q_length, kv_length, attention_mask)
    if of_images:
        offset = kwargs.get("q_offset", 0)
        return image_mask(mask, kwargs["mask_function"], batch_size, q_length, offset, kwargs.get("device"))
    if indexed or family == "compressed":
        patch_model(config)
    if not indexed:
        return mask
    return block_mask(mask, config) if family == "pooled" else IndexMask(mask)


def _causal_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None
) -> Tensor | SequenceShard | None:
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
