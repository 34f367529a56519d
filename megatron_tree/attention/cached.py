"""`tree_decode`: attention of a few replicated queries over a KV cache that is sharded across ranks. No gradients.

Ranks send queries and partial results, not the cache. Bad input raises errors as in functional.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import comm, kernels
from ..config import TreeConfig
from .precision import autocast
from .step import DecodeStep


@comm.outside_graphs
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
    shared: Sequence[kernels.SharedPages] = (),
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
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
        softmax_scale, window_size, softcap, sinks: as in `tree_attn_func`.
        alibi_slopes: as in `tree_attn_func`, of all heads; with positions.
        head_shares: query heads of every rank of cp_group, in rank order. q, sinks and the results are then those of
            this rank's heads (possibly none): q is gathered here, and "scatter" ends after its first half, in which
            each rank merges what it keeps. For weights that are split over the ranks of the cache. If every rank
            computes the queries of all heads, q may have them all, and none are gathered; sinks and results stay own.
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
    with outside:
        out, lse = DecodeStep().decode(
            q,
            k_cache,
            v_cache,
            cp_group=comm.process_group(cp_group),
            head_dim_v=head_dim_v,
            cache_seqlens=cache_seqlens,
            q_positions=q_positions,
            cache_positions=cache_positions,
            block_table=block_table,
            k_scale=k_scale,
            v_scale=v_scale,
            shared=shared,
            softmax_scale=softmax_scale,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            head_shares=head_shares,
            schedule=schedule,
            config=config,
        )
    return (out, lse) if return_lse else out
