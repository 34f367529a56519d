"""`TreeConfig(check="finite")`: look for NaN and infinities before anything is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import Ranks
from ..kernels import KVCache
from ..layout import Sharding, sequences_of


def check_finite_shares(ranks: Ranks, queries: Sharding, keys: Sharding, **tensors) -> None:
    """With config.check "finite": raise ``ValueError`` for NaN or infinities in this rank's q, k, v, dout or sinks.

    Padding is not checked and may contain anything. These are the rows of no segment of the sharding: thd padding, the
    ends of a padded batch's rows, and what Megatron's padding mask hides.
    """
    if ranks.config.check != "finite":
        return
    rank = ranks.rank
    for name, x in tensors.items():
        used = None
        if name != "sinks" and x is not None:
            segments = (keys if name in ("k", "v") else queries).segments((rank,))
            used = (sequences_of(segments, x.shape[1], device=x.device) >= 0)[None]
        _check_finite(rank, name, x, used)


def check_finite_cache(ranks: Ranks, q: Tensor, cache: KVCache, sinks: Tensor | None) -> None:
    """`check_finite_shares` for a cache. Slots beyond cache_seqlens, in pages not owned and at position -1 may contain
    anything. For pages the index in the message is [row, slot, head, column]; slots count along the row's pages.
    Of selected slots, it is [query, entry, head, column]."""
    if ranks.config.check != "finite":
        return
    rank = ranks.rank
    _check_finite(rank, "q", q)
    _check_finite(rank, "sinks", sinks)
    if cache.selected is not None:
        cache = cache.of_selected(slice(None), q.dtype)
    for i in range(len(cache.k) if cache.block_table is None else len(q)):
        row = cache.row(i, q.dtype)
        used = None if row.k_positions is None else row.k_positions >= 0
        _check_finite(rank, "k_cache", row.k, used, i)
        _check_finite(rank, "v_cache", row.v, used, i)


def check_finite_index(ranks: Ranks, q: Tensor, weights: Tensor, cache: KVCache) -> None:
    """`check_finite_cache` for an index and its keys, a cache of one head: [row, slot, head, column]."""
    if ranks.config.check != "finite":
        return
    rank = ranks.rank
    _check_finite(rank, "index_q", q)
    _check_finite(rank, "index_weights", weights)
    for i in range(q.shape[0]):
        row = cache.row(i, q.dtype)
        _check_finite(rank, "index_k", row.k, row.k_positions >= 0, i)


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
