"""Llama 4: layers whose queries see their own chunk only, and queries that grow with positions."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....core.layout import Dispatched
from .table import BY_MODEL


def chunk_size(module) -> int | None:
    """Positions of a chunk of this attention module's layer; None: its queries see all keys before them."""
    config = getattr(module, "config", None)
    if BY_MODEL.get(getattr(config, "model_type", None)) != "chunked":
        return None
    return config.attention_chunk_size if config.layer_types[module.layer_idx] == "chunked_attention" else None


@functools.lru_cache(maxsize=64)  # all layers ask, and the plans of a layout are found by it
def layout_in_chunks(layout: Dispatched, size: int) -> Dispatched:
    """The layout in which a query sees its own chunk of `size` positions only."""
    return layout.in_chunks(size)


def has_temperature(module) -> bool:
    """Whether this attention module multiplies queries by a number that grows with the position."""
    return getattr(module, "attn_temperature_tuning", False) and not module.use_rope


def with_temperature(module, q: Tensor, positions: Tensor, first: int = 0) -> Tensor:
    """q [b, n, h, d] as if the module, which counted positions from `first`, had known them: positions [b or 1, n]."""
    assumed = torch.arange(q.shape[1], device=q.device) + first
    factor = _temperature(module, positions).double() / _temperature(module, assumed).double()
    factor = factor.to(torch.promote_types(q.dtype, torch.float32))
    return (q * factor[..., None, None]).to(q.dtype)


def _temperature(module, positions: Tensor) -> Tensor:
    """Formula of Transformers' Llama4TextAttention, from "Scalable-Softmax Is Superior for Attention", 2501.19399."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
