"""Llama 4 over a `TreeCache`: layers whose queries see their own chunk only, and queries that grow with positions."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cache.forward import ForwardPass
from .architectures import CHUNKED


def chunk_size(module) -> int | None:
    """Positions of a chunk of this attention module's layer; None: its queries see all keys before them."""
    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in CHUNKED:
        return None
    return config.attention_chunk_size if config.layer_types[module.layer_idx] == "chunked_attention" else None


def with_row_temperature(module, q: Tensor, forward: ForwardPass) -> Tensor:
    """q [b, n, h, d] as if the module had known its tokens' positions.

    Without rotary positions Llama 4 multiplies queries by a number that grows with the position. It counts positions
    from the length of the cache, in each row and on each rank.
    """
    if forward.positions is None or not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return q
    assumed = torch.arange(q.shape[1], device=q.device) + max(forward.append.first)
    factor = _temperature(module, forward.positions) / _temperature(module, assumed)
    return (q * factor[..., None, None]).to(q.dtype)


def _temperature(module, positions: Tensor) -> Tensor:
    """Formula of Transformers' Llama4TextAttention, from "Scalable-Softmax Is Superior for Attention", 2501.19399."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
