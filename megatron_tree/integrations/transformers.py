"""Hugging Face Transformers: ``attn_implementation="tree"`` and a cache whose tokens are spread over ranks.

    import megatron_tree.integrations.transformers as tree_hf     # registers "tree"

    model.set_attn_implementation("tree")
    cache = tree_hf.TreeCache(model.config, cp_group=group)
    logits = tree_hf.sharded_prefill(model, input_ids, cache)     # every rank runs only its own tokens
    model(input_ids=token, past_key_values=cache)                 # every rank runs the token, attends to its shard

Training on sharded sequences is in transformers_training.py. For inference two phases share one cache. In the
sequence-sharded prefill a rank holds queries, keys and values of its own tokens (`tree_attn_func`). In all other calls
the new tokens are replicated, each rank keeps the keys and values of the slots that it owns, and the partial attention
over the shards is merged (`tree_decode`). `model.generate(..., past_key_values=cache)` takes the second way for the
prompt, too, and works with left padding.

How attention finds the cache. Transformers hands the attention function the module, q, k, v and the mask, not the
cache: a model calls ``past_key_values.update(k, v, layer_idx)`` and then the attention function, in one thread, with
the keys and values that the update returned (or, with latent attention, ones expanded from them row by row). So the
update leaves a note in a context variable, the attention call takes it, and both say which layer they are: a note of
another layer or with another number of rows is an error, never a guess.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..agree import agree, tell_failure
from ..comm import broadcast
from ..config import TreeConfig
from ..functional import tree_attn_func, tree_decode
from ..shard import Layout, shard_lengths, shard_positions, shard_segments
from .transformers_cache import Prefill, TreeCache, TreeCacheLayer, current_prefill, last_update
from .transformers_training import attend_to_shard

__all__ = [
    "TreeCache",
    "TreeCacheLayer",
    "agree_on_prompt",
    "check_model",
    "sharded_prefill",
    "tree_attention",
    "tree_mask",
]

UNSUPPORTED = ("position_bias", "alibi", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions")


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
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention function registered as "tree"; Transformers calls it once per layer.

    Args:
        query: [b, h, s, d]; key, value: [b, h_kv, n, d], what the cache's update returned (or the new ones, no cache).
        attention_mask: None or bool [b, slots], what `tree_mask` returned.
        sliding_window: keys that a query sees, itself included. softcap, s_aux: as `softcap` and `sinks` elsewhere.
    Returns: ([b, s, h, d_v], None): there are no attention weights.
    Raises: ValueError for anything that exact causal attention over a sharded cache can't honour.
    """
    update = last_update.get()
    last_update.set(None)
    shard = kwargs.get("sequence_shard")
    _check_call(module, attention_mask, 0.0 if shard else dropout, sliding_window, kwargs)
    options = {
        "softmax_scale": scaling,
        "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if shard is not None:
        if update is not None or attention_mask is not None:
            raise ValueError("a batch from shard_batch takes neither a cache nor an attention_mask of its own")
        return attend_to_shard(module, q, k, v, shard=shard, dropout=dropout, options=options), None
    if update is None:
        return _attention_without_cache(module, q, k, v, attention_mask, options), None
    layer_idx = getattr(module, "layer_idx", None)
    if update.layer_idx != layer_idx or update.num_rows != k.shape[1]:
        raise ValueError(
            f"{type(module).__name__} (layer_idx={layer_idx}) attends to {k.shape[1]} rows, but the last cache update "
            f"was one of layer {update.layer_idx} with {update.num_rows} rows: this model does not pass what the cache "
            "returns to the attention function of the same layer. Use attn_implementation='sdpa' for it"
        )
    cache = update.cache
    if update.prefill is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask: a sequence-sharded prefill takes prompts without padding only")
        options.update(cp_group=cache.cp_group, config=cache.tree_config)
        return tree_attn_func(q, k, v, causal=True, layout=update.prefill.layout, **options), None
    options.update(cp_group=cache.cp_group, config=cache.tree_config, schedule=cache.schedule)
    shard = cache.layers[layer_idx].shard
    if q.shape[1] > 1 or attention_mask is not None or sliding_window is not None:
        options.update(_positions(shard.slots, update.first_slot, q.shape[1], attention_mask))
    if shard.num_tokens == 0:  # one row that stands for none
        options["cache_seqlens"] = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
    return tree_decode(q, k, v, **options), None


def _positions(slots: Tensor, first_slot: int, num_queries: int, attention_mask: Tensor | None) -> dict[str, Tensor]:
    """Positions of queries and cached rows are their slots in the sequence, padding included; -1 for padded slots."""
    num_slots = first_slot + num_queries
    queries = torch.arange(first_slot, num_slots, device=slots.device)
    if attention_mask is not None:
        if attention_mask.shape[1] != num_slots:
            raise ValueError(
                f"attention_mask {list(attention_mask.shape)} must cover all {num_slots} slots: {first_slot} in the "
                f"cache and {num_queries} new ones"
            )
        slots = torch.where(attention_mask[:, slots], slots, -1)
    if slots.shape[-1] == 0:
        slots = slots.new_full((1,), -1)
    return {"q_positions": queries, "cache_positions": slots}


def _attention_without_cache(module, q: Tensor, k: Tensor, v: Tensor, attention_mask, options: dict) -> Tensor:
    """Plain causal attention on this rank: a forward pass with use_cache=False."""
    if current_prefill.get() is not None or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{type(module).__name__} attends to {k.shape[1]} keys with {q.shape[1]} queries without having updated a "
            "TreeCache. attn_implementation='tree' works with past_key_values=TreeCache(model.config, ...) or with "
            "use_cache=False; Transformers' own caches and layers that share keys and values don't fit"
        )
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


def _check_call(module, attention_mask, dropout: float, sliding_window: int | None, kwargs: dict) -> None:
    name = type(module).__name__
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(f"{name} asks for attention without a causal mask; attn_implementation='tree' is causal")
    if dropout:
        raise ValueError(f"{name}: attention dropout={dropout} is not supported: call model.eval() or set it to 0")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{name}: sliding_window={sliding_window} must be 1 or more, or None for no window")
    for option in UNSUPPORTED:
        if kwargs.get(option) is not None and kwargs[option] is not False:
            raise ValueError(f"{name}: {option} is not supported with attn_implementation='tree'; use 'eager'")
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2):
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask {shape}: attn_implementation='tree' takes [batch, slots] with 0 for padding (or none), "
            "not a mask of queries by keys"
        )


def tree_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config=None,
    **kwargs,
) -> Tensor | None:
    """The mask function registered as "tree": the padding mask, bool [b, kv_length], or None without padding.

    Causality and the window are the attention function's business. Transformers reports any mask beyond those (packed
    sequences, bidirectional parts, functions given by the user) by allow_is_causal_skip=False or use_vmap=True.
    """
    if not allow_is_causal_skip or use_vmap or getattr(config, "attention_chunk_size", None):
        raise ValueError(
            f"{type(config).__name__} asks for a mask that is more than causal, sliding window and padding (packed "
            "sequences, chunked or bidirectional attention); attn_implementation='tree' can't honour it. Use 'sdpa'"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch_size, kv_length):
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} must be [batch, slots] = [{batch_size}, {kv_length}]: one "
            f"entry for each of the {kv_length - q_length} cached and {q_length} new tokens"
        )
    return None if attention_mask.all() else attention_mask


@torch.no_grad()
def sharded_prefill(
    model,
    input_ids: Tensor,
    cache: TreeCache,
    *,
    layout: Layout = "zigzag",
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Run a prompt through a model with the sequence sharded over the cache's group.

    Every rank runs its own tokens through the whole network and keeps their keys and values where they are. With
    "zigzag" the prompt is padded on the right to a multiple of 2 * ranks; the padding never enters the cache.

    Args:
        model: a causal language model whose attention implementation is "tree".
        input_ids: int64 [b, s], the same on every rank, no padding.
        cache: an empty `TreeCache`.
        layout: "zigzag" (balanced work), "contiguous" or a tuple with the number of tokens of every rank.
        progress: called as progress(layers done, layers) while the ranks work.
    Returns: logits of the last token [b, vocab], bit-identical on all ranks.
    Raises: ValueError before anything is sent: wrong shape, cache in use, layout that leaves a rank without tokens.
    """
    try:
        layout, padded, owner, row = _plan_prefill(model, input_ids, cache, layout)
    except ValueError as error:
        tell_failure(cache.cp_group, error)
        raise
    agree_on_prompt(cache, input_ids, f"sharded prefill; layout={layout!r}")
    b, s = input_ids.shape
    slots = shard_positions(padded, cache.rank, cache.world, layout, device=input_ids.device)
    positions = slots.clamp(max=s - 1)  # padding rows repeat the last token: never attended, and never out of range
    rows = None if padded == s else (slots < s).nonzero().flatten()
    token = current_prefill.set(Prefill(layout, slots if rows is None else slots[rows], rows, s, progress))
    try:
        output = model(
            input_ids=input_ids[:, positions],
            position_ids=positions.expand(b, -1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor([row if cache.rank == owner else 0], device=input_ids.device),
        )
    finally:
        current_prefill.reset(token)
        last_update.set(None)
    logits = output.logits[:, -1].contiguous()
    return broadcast(logits, cache.cp_group, owner)


def _plan_prefill(model, input_ids: Tensor, cache: TreeCache, layout: Layout) -> tuple[Layout, int, int, int]:
    """(layout, length with padding, group rank of the last token, its row there); ValueError if it can't be done."""
    check_model(model)
    if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.dtype != torch.int64:
        shape = f"{list(input_ids.shape)} {input_ids.dtype}"
        raise ValueError(f"input_ids must be int64 [batch, tokens] with at least one token, got {shape}")
    if cache.get_seq_length():
        raise ValueError(
            f"cache holds {cache.get_seq_length()} tokens; sharded_prefill starts a sequence. Feed the new tokens to "
            "the model (replicated), or reset the cache"
        )
    s, world = input_ids.shape[1], cache.world
    padded = s + (-s % (2 * world) if layout == "zigzag" else 0)
    lengths = shard_lengths(padded, world, layout)
    if 0 in lengths:
        raise ValueError(
            f"layout={layout!r} leaves group rank {lengths.index(0)} without a token of {s}: give every rank at least "
            "one, or use layout='zigzag'"
        )
    if layout != "zigzag":
        layout = lengths  # "contiguous" alone stands for equal shares in the attention
    return layout, padded, *_find(s - 1, padded, world, layout)


def agree_on_prompt(cache: TreeCache, input_ids: Tensor, what: str) -> None:
    """Raise the same ``ValueError`` on all ranks of the cache's group unless they hold the same prompt."""
    config = cache.tree_config or TreeConfig()
    digest = hashlib.sha256(input_ids.cpu().numpy().tobytes()).hexdigest()[:16] if cache.world > 1 else ""
    signature = (
        f"{what}; input_ids={list(input_ids.shape)}; digest of input_ids={digest}; cached={cache.get_seq_length()}"
    )
    agree(cache.cp_group, signature, check=config.check, timeout_s=config.timeout_s)


def _find(position: int, seq_len: int, world: int, layout: Layout) -> tuple[int, int]:
    """The rank that holds a position, and the row at which it does."""
    for rank in range(world):
        for segment in shard_segments(seq_len, rank, world, layout):
            if 0 <= position - segment.pos < segment.length:
                return rank, segment.row + position - segment.pos
    raise AssertionError((position, seq_len, world, layout))


def check_model(model) -> None:
    """Raise ``ValueError`` unless the model's attention implementation is "tree"."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if name != "tree":
        raise ValueError(f"the model's attn_implementation is {name!r}: call model.set_attn_implementation('tree')")


AttentionInterface.register("tree", tree_attention)
AttentionMaskInterface.register("tree", tree_mask)
