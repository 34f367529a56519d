"""`TreeConfig(check="finite")`: look for NaN and infinities before anything is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import TreeConfig
from ..kernels import Visible
from ..layout import Sharding, sequences_of


def check_finite_shares(config: TreeConfig, cp_group, queries: Sharding, keys: Sharding, **tensors) -> None:
    """With config.check "finite": raise ``ValueError`` for NaN or infinities in this rank's q, k, v, dout or sinks.

    Padding is not checked and may contain anything. These are the rows of no segment of the sharding: thd padding, the
    ends of a padded batch's rows, and what Megatron's padding mask hides.
    """
    if config.check != "finite":
        return
    rank = comm.group_rank(cp_group)
    for name, x in tensors.items():
        used = None
        if name != "sinks" and x is not None:
            segments = (keys if name in ("k", "v") else queries).segments((rank,))
            used = (sequences_of(segments, x.shape[1], device=x.device) >= 0)[None]
        _check_finite(rank, name, x, used)


def check_finite_cache(config: TreeConfig, cp_group, q, k_cache, v_cache, sinks, visible: Visible, paged=None) -> None:
    """`check_finite_shares` for a cache. Slots beyond cache_seqlens, in pages not owned and at position -1 may contain
    anything. For pages the index in the message is [row, slot, head, column]; slots count along the row's pages."""
    if config.check != "finite":
        return
    rank = comm.group_rank(cp_group)
    _check_finite(rank, "q", q)
    _check_finite(rank, "sinks", sinks)
    for row in range(q.shape[0]):
        length = None if visible.lengths is None else int(visible.lengths[row])
        if paged is None:
            found = (None if x is None else x[row : row + 1, :length] for x in (k_cache, v_cache))
        else:
            found = kernels.gather_row(k_cache, v_cache, paged, row, length, q.dtype)
        for name, x in zip(("k_cache", "v_cache"), found):
            used = None if visible.k_positions is None else visible.k_positions[row : row + 1, : x.shape[1]] >= 0
            _check_finite(rank, name, x, used, row)


def _check_finite(rank: int, name: str, x: Tensor | None, used: Tensor | None = None, first_row: int = 0) -> None:
    """used: bool [b or 1, s], the rows of x [b, s, ...] to check."""
    if x is None or not x.numel():
        return
    bad = ~torch.isfinite(x)
    if used is not None:
        bad &= used.unflatten(1, (used.shape[1], *(1 for _ in x.shape[2:])))
    if bad.any():
        at = bad.nonzero()[0].tolist()
        value = x[tuple(at)].item()
        at[0] += first_row
        raise ValueError(
            f"{name} on rank {rank} of cp_group holds NaN or infinities in {int(bad.sum())} places, the first at "
            f"{name}{at} = {value}: check the code that computes {name} on that rank (found by check='finite')"
        )
