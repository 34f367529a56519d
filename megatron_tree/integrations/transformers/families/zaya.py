"""ZAYA's projection of q, k and v, which sees the tokens before a token, over tokens that are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ....core.recurrence.halo import tree_halo
from ....core.recurrence.layer import joined
from ....core.recurrence.scan import depending_on
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
    and half of v from the row before. A cache has, and gets, those of the rows before the sequence's end."""
    if mask is not None or (cache is not None and isinstance(run.layout, str)):
        raise ValueError("ZayaCCAProjection trains on shards without a cache, and without padding in its mask")
    count, earlier, delayed_before = module.conv_kernel_size, None, None
    if cache is not None:
        earlier, delayed_before = cache.get_conv_state(module.layer_idx), cache.get_recurrent_state(module.layer_idx)
    halos, final = tree_halo(hidden_states, count, return_final=cache is not None, **run.options)
    segments, parts = run.segments(hidden_states.shape[1]), []
    for number, segment in enumerate(segments):
        halo, goes_on = halos[:, number], segment.pos or delayed_before is None
        delayed = module.v_proj_delayed(halo[:, -1]) if goes_on else delayed_before
        before = _RowsBefore(_projected(module, halo, segment.pos, earlier), delayed)
        parts.append(original(module, hidden_states[:, segment.row : segment.row + segment.length], before))
    if cache is not None:
        run.num_final_rows = count
        run.final_conv_state = _projected(module, final, run.layout.lengths[0], earlier)
        cache.update_recurrent_state(module.v_proj_delayed(final[:, -1]), module.layer_idx)
    results = []
    for i, x in enumerate(parts[0] if parts else original(module, hidden_states, None)):
        like = x.new_empty(*hidden_states.shape[:2], *x.shape[2:])
        results.append(depending_on(joined(segments, {n: part[i] for n, part in enumerate(parts)}, like), halos))
    return tuple(results)


def _projected(module: nn.Module, rows: Tensor, pos: int, earlier: Tensor | None) -> Tensor:
    """What the convolution sees before position pos, [b, c, n]: projections of the n rows there, and where the sequence
    has not begun, a cache's rows or 0 (not the projections of rows of 0)."""
    x = torch.cat((module.q_proj(rows), module.k_proj(rows)), -1).transpose(1, 2)
    missing = max(0, x.shape[-1] - pos)
    earlier = torch.zeros_like(x) if earlier is None else earlier
    return torch.cat((earlier[..., x.shape[-1] - missing :], x[..., missing:]), -1)
