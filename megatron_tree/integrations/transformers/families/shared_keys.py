"""Layers that attend to the keys and values of an earlier layer: the last ones of Gemma 3n and Gemma 4.

Such a layer calls the attention function with what the earlier layer's cache update returned, without an update of its
own: over a `TreeCache` it reads the earlier layer's pages. On shards nothing differs.
"""

from __future__ import annotations

MODELS = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")


def holds(config) -> bool:
    """Whether a model is one of these, with such layers."""
    text = config.get_text_config(decoder=True)
    return text.model_type in MODELS and text.num_kv_shared_layers > 0


def sources(text) -> dict[int, int]:
    """By number these layers, and the one whose keys and values each reads: the last of its type that has its own."""
    last, found = {}, {}
    for i, (mode, kind) in enumerate(zip(text.kv_sharing_modes, text.layer_types, strict=True)):
        if mode == "store":
            last[kind] = i
        elif mode == "reuse":
            found[i] = last[kind]
    return found


def all_inputs(plain, model, *inputs, **options):
    """Gemma 4 runs these layers only for tokens that get logits, the last input says which. Here they run for all: a
    pass over a cache, or a shard, has queries of all."""
    return inputs[:-1] if model.config._attn_implementation == "tree" else plain(model, *inputs, **options)
