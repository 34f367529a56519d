"""Transformers' multi-latent attention (DeepSeek V2, V3 and relatives) over a `TreeCache`.

These models update the cache with latents and rotary keys, make keys and values of all that it returns in a method
`expand_kv` of their attention, and pass them to the attention function. Over a `TreeCache` that method hands latents on
as they are, and the attention function takes the model's own weights to read them with (cache/latent.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ....core.cache.latent import LatentHeads
from ..infer.model_runs import last_update


def hand_on(expand_kv: Callable, module, latents: Tensor, rotary_keys: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv` of an attention, which hands on the latents of a cache's last update."""
    update = last_update.get()
    of_cache = update is not None and update.keys is latents
    return (latents, rotary_keys) if of_cache else expand_kv(module, latents, rotary_keys)


def latent_heads(module) -> LatentHeads:
    """How an attention module's heads, or this rank's share of them, read latents: a view of its kv_b_proj.

    Raises: ValueError for a projection that is no matrix of floating-point numbers.
    """
    weight, nope = module.kv_b_proj.weight, module.qk_nope_head_dim
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[1] != module.kv_lora_rank:
        raise ValueError(
            f"{type(module).__name__}.kv_b_proj has a weight {list(weight.shape)} {weight.dtype}: attention over "
            f"latents reads [heads * (qk_nope_head_dim + v_head_dim), {module.kv_lora_rank}] in fp32, bf16 or fp16"
        )
    return LatentHeads(weight.unflatten(0, (-1, nope + module.v_head_dim)), nope)
