"""`tree_prefill`: attention of a chunk of a prompt over a KV cache, both sharded across ranks. No gradients.

Ranks send queries and partial results, not the cache, unless the keys are fewer. Bad input raises errors as in
functional.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec, TreeConfig, check_positive, default_config
from ..layout import Segment
from ..merge import State, join_heads, merge_sinks
from ..plan import chunk_sizes
from .cell import Cell, CellForward
from .derivatives import check_tangents, in_torch
from .finite import check_finite_cache
from .head_shares import all_heads_of, check_head_shares, has_all_heads
from .heads import HeadChunk, head_chunks
from .precision import autocast
from .prefill_cell import LatentCell, PrefillGrid, PromptChunk
from .spec import make_spec
from .topology import GroupTopology
from .validate import check_latents, check_runs, check_segments, check_sinks
from .validate_cache import check_cache


@comm.outside_graphs
def tree_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    cp_group,
    head_dim_v: int | None = None,
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    shares: Sequence[Sequence[tuple[int, int]]],
    key_segments: Sequence[Segment] | Sequence[Sequence[Segment]],
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attention_chunk_size: int | None = None,
    head_shares: Sequence[int] | None = None,
    grid: tuple[int, int] | None = None,
    config: TreeConfig | None = None,
) -> Tensor:
    """Exact causal attention of a chunk of a prompt over a cache, both sharded. Collective; no gradients.

    Args:
        q: [b, n, h, d], this rank's queries of the chunk; n may differ between ranks, and may be 0.
        k_cache, v_cache: [b, s_local, h_kv, d] and [b, s_local, h_kv, d_v]: all keys that this rank holds, including
            the chunk's.
        cp_group: the process group over which both are sharded, or a 1-D DeviceMesh; None for one rank.
        head_dim_v: as in `tree_decode`, also with expand: then that of the values that it makes.
        expand: with v_cache=None: makes keys [b, n, h_kv, d] and values [b, n, h_kv, d_v] of n entries of k_cache
            [b, n, 1, any size]; it is called for a part of them at a time.
        shares: for each group rank the positions of its queries, in order, as runs (first position, count).
        key_segments: the positions of this rank's keys, as (row, position, length) each; without a window or slopes,
            keys before the chunk may be in any order. Or a list of these for every group rank, where keys are gathered.
        attention_chunk_size: queries see keys of their own chunk of so many positions only (Llama 4's local layers).
        head_shares: as in `tree_decode`: the queries' heads are sharded then, not their tokens. q holds all queries of
            the chunk, shares has one entry for them. Where keys are gathered, k_cache has one head.
        grid: (a, b) with a * b = ranks: queries are gathered over a ranks, keys over b. (ranks, 1) sends least once the
            cache is long, (1, ranks) while there are few keys. None: one of these, the second if there are key_segments
            for every rank.
        Others as in `tree_decode`; comm_dtype of config is used as well.
    Returns: out [b, n, h, d_v] in q's dtype.
    Raises: as `tree_decode`.
    Source: Tree Attention's reduction (arXiv 2408.04093) on a grid (docs/design.md, section 3).
    """
    config, cp_group = config or default_config(), comm.process_group(cp_group)
    outside, q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    with comm.collective_call("tree_prefill", cp_group, config) as call, outside, torch.no_grad():
        comm.check_local(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, alibi_slopes=alibi_slopes)
        latent = v_cache is None
        head_shares = check_head_shares(head_shares, q, cp_group)
        whole = all_heads_of(q, head_shares)
        if expand is None:
            check_cache(whole, cache := kernels.KVCache(k_cache, v_cache, head_dim_v=head_dim_v))
            v_cache = cache.values
        else:
            check_latents(q, k_cache, v_cache, head_dim_v)
            if isinstance(outside, torch.autocast):
                expand = torch.autocast(q.device.type)(expand)  # its weights are the caller's
        options = dict(deterministic=config.deterministic, alibi_slopes=alibi_slopes)
        spec = make_spec(whole, True, softmax_scale, window_size, softcap, **options)
        rank, world = comm.group_rank(cp_group), comm.group_size(cp_group)
        check_sinks(sinks, q, None if head_shares is None else head_shares[rank])
        size = check_positive("attention_chunk_size", attention_chunk_size)
        chunk = PromptChunk(rank, check_runs(shares), check_segments(key_segments), size, head_shares)
        chunk.check(q.shape[1], k_cache.shape[1], world)
        grid = chunk.checked_grid(grid, world, num_heads_kv=k_cache.shape[2], expands=expand is not None)
        k_like, v_like = (k_cache, v_cache) if expand is None else (q[:, :1], q[:, :1, :, :head_dim_v])
        backend = kernels.choose(whole, k_like, v_like, spec, config.backend)
        if not in_torch(cp_group, backend):
            check_tangents(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
        check_finite_cache(config, cp_group, q, kernels.KVCache(k_cache, None if latent else v_cache), sinks)
        net = GroupTopology.of(cp_group, q.device, config)
        gathers_heads = not has_all_heads(q, head_shares)
        num_keys = chunk.num_keys if grid[1] > 1 else None
        call.agree(
            batch=q.shape[0],
            num_heads=whole.shape[2],
            num_heads_kv=k_cache.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v_like.shape[3],
            latent=latent,
            expanded=expand is not None,
            dtype=q.dtype,
            spec=spec,
            sinks=sinks is not None,
            head_shares=head_shares,
            gathers_heads=gathers_heads,
            shares=str(chunk.shares),
            attention_chunk_size=size,
            grid=grid,
            num_keys=num_keys,
            config=config,
            topology=net.digest,
        )
        sizes = chunk_sizes(
            world,
            sum(chunk.num_queries),
            sum(num_keys) if num_keys else chunk.end,
            num_heads=whole.shape[2],
            head_dims=(q.shape[3], v_like.shape[3]),
            key_numbers=k_cache.shape[2] * (k_cache.shape[3] + (0 if latent else v_cache.shape[3])),
            bytes_per_word=q.element_size(),
            sends_queries=head_shares is None or gathers_heads,
        )
        num_heads_kv = 1 if latent or head_shares is not None else k_cache.shape[2]
        place = PrefillGrid.of(grid, sizes, num_heads_kv, cp_group, q.device, config)
        queries, spec = chunk.queries(place.query_team, spec)
        wire = torch.promote_types(q.dtype, torch.float32) if config.comm_dtype == "fp32" else q.dtype
        cell = dict(queries=queries, keys=chunk.keys(place.key_team), backend=backend, wire=wire)
        if latent:
            cell, kv = LatentCell(**cell, expand=expand, head_dim_v=v_like.shape[3]), (k_cache,)
        else:
            cell, kv = Cell(**cell), (k_cache, v_cache)
        out, lse = _attend(cell, spec, place.head_chunks, q, kv)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
    return out.to(q.dtype)


def _attend(cell: Cell, spec: AttnSpec, num_chunks: int, q: Tensor, kv: tuple[Tensor, ...]) -> State:
    """The state of this rank's queries over the whole cache, without sinks; spec is of the cell's heads."""
    if num_chunks == 1:
        chunks = [HeadChunk.all(spec)]
    else:
        chunks = head_chunks(q.shape[2], kv[0].shape[2], num_chunks, spec)
    chunks = [CellForward(cell, chunk, q, kv) for chunk in chunks]
    comm.run_stages(chunks)
    return join_heads([chunk.state for chunk in chunks])
