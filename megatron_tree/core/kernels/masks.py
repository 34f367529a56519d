"""Which keys a query sees, for the backends in torch. The oracle, energy.py, has its own implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import AttnSpec


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


class SelectedKeys:
    """Which keys each query has selected, by position in its sequence, as a mask of rows.

    Args:
        selected: int32 [b, s_q, m]: positions; -1, and those that aren't among the keys, select nothing.
        q_seq, k_seq: int64 [s_q] and [s_k]: each row's sequence, -1 for padding. k_pos: int64 [s_k], positions.
    """

    def __init__(self, selected: Tensor, q_seq: Tensor, k_seq: Tensor, k_pos: Tensor):
        self._selected, self._q_seq = selected, q_seq
        self._length = int(k_pos.max()) + 1 if len(k_pos) else 0
        numbers = torch.where(k_seq < 0, -1, k_seq * self._length + k_pos)  # one number for sequence and position
        self._numbers, self._rows = numbers.sort()

    def mask(self, rows: slice) -> Tensor:
        """bool [b, rows, s_k]."""
        at, count = self._selected[:, rows].long(), len(self._rows)
        mask = at.new_zeros((*at.shape[:2], count + 1), dtype=torch.bool)
        if count == 0:
            return mask[..., :0]
        number = self._q_seq[rows, None] * self._length + at
        number = torch.where((at < 0) | (at >= self._length) | (self._q_seq[rows, None] < 0), -2, number)
        found = torch.searchsorted(self._numbers, number.contiguous()).clamp(max=count - 1)
        mask.scatter_(-1, torch.where(self._numbers[found] == number, self._rows[found], count), True)
        return mask[..., :count]
