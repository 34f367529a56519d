"""Which keys a query sees, for the backends in torch. The oracle, energy.py, has its own implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import AttnSpec


def window_mask(q_positions: Tensor, k_positions: Tensor, spec: AttnSpec) -> Tensor:
    """The window of `spec`: bool [..., s_q, s_k] from integer positions [..., s_q] and [..., s_k]."""
    q, k = q_positions[..., :, None], k_positions[..., None, :]
    if spec.left is None and spec.right is None:  # not torch.broadcast_shapes, which imports sympy: seconds
        return torch.ones_like(torch.broadcast_tensors(q, k)[0], dtype=torch.bool)
    seen = True if spec.left is None else k >= q - spec.left
    return seen if spec.right is None else seen & (k <= q + spec.right)


def alibi_bias(spec: AttnSpec, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
    """What ALiBi adds to logits: [1 or b, h, s_q, s_k] in `dtype`, from positions [s_q] or [b, s_q], and of keys."""
    distance = (q_positions[..., :, None] - k_positions[..., None, :]).abs()
    slopes = torch.tensor(spec.alibi_slopes, dtype=dtype, device=distance.device)[..., None, None]
    return -slopes * (distance[:, None] if distance.dim() == 3 else distance)
