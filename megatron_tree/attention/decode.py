"""Decoding over a KV cache that is sharded across ranks: attention of a few replicated queries. No gradients.

Ranks send queries and partial results, not the cache. `tree_decode` is one call; the layers of a model's step share a
`DecodeStep`, which checks and plans what they have in common once. Bad input raises errors as in functional.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import comm
from ..config import TreeConfig
from ..kernels import KVCache, SharedPages
from .decode_call import DecodeCall, DecodeOptions
from .precision import autocast

TRUSTING = ("first", "never")  # values of `TreeConfig.check` with which calls that are alike are checked once


@comm.public_call
def tree_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    cp_group,
    head_dim_v: int | None = None,
    cache_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
    cache_positions: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    shared: Sequence[SharedPages] = (),
    selected: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    head_shares: Sequence[int] | None = None,
    schedule: str = "auto",
    config: TreeConfig | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a few queries over a KV cache sharded across ranks. Collective over cp_group; no gradients.

    Args:
        q: [b, s_q, h, d], the same on every rank.
        k_cache, v_cache: [b, s_local, h_kv, d] and [b, s_local, h_kv, d_v]: this rank's slots, in any order; s_local
            may differ between ranks and may be 0. The keys of the new tokens must already be in one rank's cache.
        cp_group: the process group over which the cache is sharded, or a 1-D DeviceMesh; None for one rank.
        head_dim_v: with v_cache=None: the first head_dim_v numbers of a key are its value (latent attention).
        cache_seqlens: int [b], how many leading slots of this rank's shard are valid; default: all.
        q_positions, cache_positions: int64 [b, s_q] or [s_q], and [b, s_local] or [s_local]. A query sees a slot if
            0 <= the slot's position <= the query's, within the window; -1 hides a slot (padding). Needed for s_q > 1
            and for windows; without them every query sees every valid slot.
        block_table: int32 [b, n]: k_cache and v_cache are then pages [pages, page_size, h_kv, d] and [.., d_v], and row
            i's slots are those of the pages block_table[i], in order: s_local = n * page_size. Needs cache_seqlens.
        k_scale, v_scale: fp32 [pages, page_size, h_kv], for pages in int8 or fp8 (`cache.quantize`).
        shared: `kernels.SharedPages` that rows begin with, on this rank, before those of block_table: all queries see
            them, and they are read once for all their rows. cache_seqlens and positions are of block_table's slots.
        selected: int32 [b, s_q, m], slots of this rank that each query attends to, each once, as `tree_select` returns
            them: no others are read. -1 is none; m may differ between ranks. Then without positions, window, ALiBi,
            shared pages and the ring.
        softmax_scale, window_size, softcap, sinks: as in `tree_attn_func`.
        alibi_slopes: as in `tree_attn_func`, of all heads; with positions.
        head_shares: query heads of every rank of cp_group, in rank order, for weights that are split over these ranks.
            q, sinks and the results are then those of this rank's heads (possibly none), and q is gathered. If every
            rank computes the queries of all heads, q may have them all; sinks and results stay local.
        schedule: "auto", "allreduce" (the paper's Algorithm 3), "allgather", "butterfly", "scatter", "two_level"
            (inside nodes first), "ring" (baseline).
        config: `TreeConfig`; backend, topology, transport, memory_budget, timeout_s, check and deterministic are used.
        return_lse: also return lse [b, h, s_q], fp32, natural log.

    Under torch.autocast q and the caches are cast as for torch's scaled_dot_product_attention, but for pages in 8 bits.
    A cache in another dtype is copied in every call.

    Returns: out [b, s_q, h, d_v] in q's dtype (and lse), bit-identical on all ranks that return a head.
    Raises: ValueError for bad input or arguments that differ between ranks; CommError if a rank failed or does not
        respond.
    """
    outside, q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    cache = KVCache(
        k_cache, v_cache, k_scale, v_scale, head_dim_v, cache_seqlens, q_positions, cache_positions, block_table,
        shared, selected,
    )  # fmt: skip
    ranks = comm.Ranks.of(cp_group, q.device, config)
    options = DecodeOptions(ranks, softmax_scale, window_size, softcap, alibi_slopes, head_shares, schedule)
    with ranks.call("tree_decode") as call, outside, torch.no_grad():
        out, lse = DecodeCall.planned(call, q, cache, options, sinks).run(q, cache, sinks)
    return (out, lse) if return_lse else out


class DecodeStep:
    """The decode calls of a step's layers. No table, length, position or slope is written to between them.

    A call is checked, compared among the ranks and planned unless an earlier one had everything on which this depends:
    shapes, dtypes and devices, options, and the very tensors that say which slots the queries see.
    """

    def __init__(self):
        self._known: dict[tuple, tuple[DecodeCall, tuple]] = {}

    def decode(
        self,
        q: Tensor,
        cache: KVCache,
        options: DecodeOptions,
        *,
        sinks: Tensor | None = None,
        projection: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`tree_decode`: out [b, s_q, h, d_v] in q's dtype and lse [b, h, s_q].

        projection: [h, d_out, d_v] in q's dtype, for this rank's heads or for all heads on every rank: out is
            [b, s_q, h, d_out], each head's result times its matrix. With all heads' the ranks merge projected
            results if the planner predicts that to be faster.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.decode(q, cache, options, sinks=sinks, projection=projection)
        ranks, *numbers, slopes, head_shares, schedule = options
        tensors = (q, *cache[:4], sinks, projection)
        selected = cache.selected
        if selected is not None:  # each layer has its own, which may be of another length
            selected = selected.shape[:2], selected.dtype, selected.device
        same = (*cache[5:10], ranks, slopes)  # compared by identity, and kept with the key
        key = (
            *[x if x is None else (x.shape, x.dtype, x.device) for x in tensors],
            *(cache.head_dim_v, selected, *numbers, head_shares, schedule),
            *map(id, same),
        )
        planned, _ = self._known.get(key, (None, None))
        if planned is not None and planned.is_alone:
            return planned.run(q, cache, sinks, projection)
        with ranks.call("tree_decode") as call:
            if planned is not None:
                call.repeat(planned.agreement)
            else:
                planned = DecodeCall.planned(call, q, cache, options, sinks, projection)
                if ranks.config.check in TRUSTING:
                    self._known[key] = planned, same
            return planned.run(q, cache, sinks, projection)
