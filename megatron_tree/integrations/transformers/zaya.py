"""ZAYA's projection of q, k and v, which sees the tokens before a token, over tokens that are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...recurrence.halo import tree_halo
from .recurrent import RecurrentRun


class _RowsBefore:
    """What `ZayaCCAProjection` asks a cache for."""

    def __init__(self, projected: Tensor, delayed: Tensor):
        self.projected, self.delayed = projected, delayed

    def get_conv_state(self, layer_idx: int, state_idx: int) -> Tensor:
        return self.projected

    def get_recurrent_state(self, layer_idx: int, state_idx: int) -> Tensor:
        return self.delayed

    def update_conv_state(self, state: Tensor, layer_idx: int) -> None:
        pass

    def update_recurrent_state(self, state: Tensor, layer_idx: int) -> None:
        pass


def cca_projection(
    run: RecurrentRun, original: Callable, module: nn.Module, hidden_states: Tensor, cache, mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    """ZAYA's q, k, v [b, s_local, h, d] of hidden_states [b, s_local, c]: projections convolved over the rows before,
    and half of v from the row before."""
    if cache is not None or mask is not None:
        raise ValueError("ZayaCCAProjection runs on shards of a batch without a cache and without padding in its mask")
    count = module.conv_kernel_size
    halos, _ = tree_halo(hidden_states, count, **run.options)
    projected = torch.cat((module.q_proj(halos), module.k_proj(halos)), -1)
    delayed = module.v_proj_delayed(halos[:, :, -1])
    parts = []
    for rows, number, segment in run.parts(hidden_states.shape[1]):
        before = None
        if segment is not None:  # a convolution begins with projections of 0, not with those of rows of 0
            nothing = max(0, count - segment.pos)
            state = F.pad(projected[:, number, nothing:], (0, 0, nothing, 0))
            before = _RowsBefore(state.transpose(1, 2), delayed[:, number])
        parts.append(original(module, hidden_states[:, rows], before))
    return tuple(torch.cat(x, 1) for x in zip(*parts))
