"""Which keys a query sees, for the backends in torch. The oracle, energy.py, has its own implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..config import AttnSpec


def visible(q_positions: Tensor, k_positions: Tensor, spec: AttnSpec) -> Tensor:
    """The window of `spec`: bool [..., s_q, s_k] from integer positions [..., s_q] and [..., s_k]."""
    q, k = q_positions[..., :, None], k_positions[..., None, :]
    if spec.left is None and spec.right is None:  # not torch.broadcast_shapes, which imports sympy: seconds
        return torch.ones_like(torch.broadcast_tensors(q, k)[0], dtype=torch.bool)
    seen = True if spec.left is None else k >= q - spec.left
    return seen if spec.right is None else seen & (k <= q + spec.right)


def distances(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """|query position - key position|: int64 [..., s_q, s_k] from integer positions [..., s_q] and [..., s_k]."""
    return (q_positions[..., :, None] - k_positions[..., None, :]).abs()


def alibi_bias(spec: AttnSpec, distance: Tensor, dtype: torch.dtype) -> Tensor:
    """What ALiBi adds to logits: [1 or b, h, s_q, s_k] in `dtype`, of distances [s_q, s_k] or [b, s_q, s_k]."""
    slopes = torch.tensor(spec.alibi_slopes, dtype=dtype, device=distance.device)[..., None, None]
    return -slopes * (distance[:, None] if distance.dim() == 3 else distance)


class Visible(NamedTuple):
    """Which slots of a KV shard a query sees, for decoding. Nothing given: all of them.

    lengths: int [b], valid leading slots. q_positions int64 [b, s_q] and k_positions int64 [b, s], both or neither:
    a slot is seen when 0 <= its position <= the query's, within the window.
    """

    lengths: Tensor | None = None
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None

    def needs_mask(self, paged: bool) -> bool:
        """Whether torch's kernels need a mask for this. Rows gathered from pages are cut to their lengths."""
        return self.k_positions is not None or (self.lengths is not None and not paged)

    def row(self, some: slice) -> Visible:
        """The same of some rows of the batch."""
        return Visible(*(None if x is None else x[some] for x in self))

    def mask(self, num_slots: int, spec: AttnSpec) -> Tensor | None:
        """bool [b, 1 or s_q, num_slots], or None where every slot is seen."""
        keep = None
        if self.k_positions is not None:
            keep = visible(self.q_positions, self.k_positions, spec) & (self.k_positions >= 0)[:, None]
        if self.lengths is not None:
            valid = (torch.arange(num_slots, device=self.lengths.device) < self.lengths[:, None])[:, None]
            keep = valid if keep is None else keep & valid
        return keep

    def bias(self, spec: AttnSpec, dtype: torch.dtype) -> Tensor:
        """What ALiBi adds to logits: [b, h, s_q, s] in `dtype`."""
        return alibi_bias(spec, distances(self.q_positions, self.k_positions), dtype)
