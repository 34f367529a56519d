"""Multi-latent attention of a served GPTModel: core attention gets latents instead of keys and values.

Megatron's layer passes latents to an up-projection, which makes the keys and values of its heads. While the model is
served the up-projection keeps its input; core attention takes that and the rotary part of the keys, and reads the cache
with the up-projection's weight (cache/latent.py).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from ...core.cache.latent import LatentHeads
from . import compat
from .attention import serving


class Latents(NamedTuple):
    """The input of a layer's up-projection."""

    tokens: Tensor
    """[n, b, r], normed."""
    heads: LatentHeads
    """How this rank's heads read them."""


def hand_latents_on(model: Any) -> None:
    """Change a GPTModel's multi-latent attention; outside of a `ServedPass` it is unchanged."""
    for layer in model.decoder.modules():
        if (up := getattr(layer, "linear_kv_up_proj", None)) is not None:
            up.forward = functools.partial(_hand_on, layer, up, up.forward)


def _hand_on(layer: Any, up: Any, forward, latents: Tensor, *args, **kwargs):
    served = serving.get()
    if served is None:
        return forward(latents, *args, **kwargs)
    nope = layer.config.qk_head_dim
    heads = LatentHeads(up.weight.unflatten(0, (-1, nope + layer.config.v_head_dim)), nope)
    served.latents[layer.core_attention] = Latents(compat.normed_input(up, latents, layer.config), heads)
    unread = latents.new_zeros(1).expand(*latents.shape[:-1], len(up.weight))  # takes no memory
    return unread, None
