"""`tree_prefill`: attention of a chunk of a prompt over a KV cache, both sharded across ranks. No gradients.

Ranks send queries and partial results, not the cache, unless the keys are fewer. Bad input raises errors as in
functional.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec, TreeConfig, check_positive
from ..kernels import KVCache
from ..layout import Segment
from ..merge import State, join_heads, merge_sinks
from ..plan import chunk_sizes, run_stages
from .cell import Cell, CellForward, Selected, wire_dtype
from .derivatives import check_tangents, in_torch
from .finite import check_finite_cache
from .head_shares import all_heads_of, check_head_shares, has_all_heads
from .heads import HeadChunk, head_chunks
from .precision import autocast
from .prefill_cell import LatentCell, PromptChunk, place_on_grid
from .spec import make_spec
from .validate import check_latents, check_runs, check_segments, check_selected, check_sinks
from .validate_cache import check_cache


@comm.public_call
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
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attention_chunk_size: int | None = None,
    selected: Tensor | None = None,
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
        selected: int32 [b, n, m], the positions of the keys that each of these queries sees, -1 for none
            (`tree_select_prefill`); all positions in key_segments are the keys' own then.
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
    outside, q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    if expand is not None and isinstance(outside, torch.autocast):
        expand = torch.autocast(outside.device)(expand)  # its weights are the caller's
    ranks = comm.Ranks.of(cp_group, q.device, config)
    with ranks.call("tree_prefill") as call, outside, torch.no_grad():
        head_shares = check_head_shares(head_shares, q, ranks)
        whole, cache = all_heads_of(q, head_shares), KVCache(k_cache, v_cache, head_dim_v=head_dim_v)
        if expand is None:
            check_cache(whole, cache)
        else:
            check_latents(q, k_cache, v_cache, head_dim_v)
        options = dict(deterministic=config.deterministic, alibi_slopes=alibi_slopes)
        spec = make_spec(whole, True, softmax_scale, window_size, softcap, **options)
        size = check_positive("attention_chunk_size", attention_chunk_size)
        check_sinks(sinks, q, None if head_shares is None else head_shares[ranks.rank])
        check_selected(selected, q, spec, None)
        chunk = PromptChunk(ranks.rank, check_runs(shares), check_segments(key_segments), size, head_shares)
        given = dict(ranks=ranks, chunk=chunk, spec=spec, whole=whole, cache=cache, expand=expand)
        given["selected"] = selected
        prefill = _Prefill.checked(q, sinks, grid, **given)
        prefill.agree(call, q, sinks)
        out, lse = prefill.run(q)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
    return out.to(q.dtype)


@dataclass(frozen=True, kw_only=True)
class _Prefill:
    """A checked call."""

    ranks: comm.Ranks
    chunk: PromptChunk
    spec: AttnSpec
    grid: tuple[int, int]
    backend: kernels.Backend
    whole: Tensor
    """A stand-in for q with the heads of all ranks."""
    cache: KVCache
    head_dim_v: int
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None
    selected: Tensor | None
    gathers_heads: bool

    @classmethod
    def checked(cls, q: Tensor, sinks: Tensor | None, grid: tuple[int, int] | None, **given) -> _Prefill:
        """Check what depends on several arguments. given: the fields that follow from one."""
        ranks, chunk, cache, expand = (given[name] for name in ("ranks", "chunk", "cache", "expand"))
        world = ranks.size
        chunk.check(q.shape[1], cache.k.shape[1], world)
        grid = chunk.checked_grid(grid, world, num_heads_kv=cache.k.shape[2], expands=expand is not None)
        like = (cache.k, cache.values) if expand is None else (q[:, :1], q[:, :1, :, : cache.head_dim_v])
        selects = given["selected"] is not None
        backend = kernels.choose(given["whole"], *like, given["spec"], ranks.config.backend, selects=selects)
        if not in_torch(ranks, backend):
            check_tangents(q=q, k_cache=cache.k, v_cache=cache.v, sinks=sinks)
        check_finite_cache(ranks, q, cache, sinks)
        gathers_heads = not has_all_heads(q, chunk.head_shares)
        return cls(grid=grid, backend=backend, head_dim_v=like[1].shape[3], gathers_heads=gathers_heads, **given)

    @property
    def num_keys(self) -> tuple[int, ...] | None:
        """Of every rank, where keys are gathered."""
        return self.chunk.num_keys if self.grid[1] > 1 else None

    def agree(self, call: comm.CollectiveCall, q: Tensor, sinks: Tensor | None) -> None:
        call.agree(
            batch=q.shape[0],
            num_heads=self.whole.shape[2],
            num_heads_kv=self.cache.k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=self.head_dim_v,
            latent=self.cache.v is None,
            expanded=self.expand is not None,
            dtype=q.dtype,
            spec=self.spec,
            sinks=sinks is not None,
            selected=None if self.selected is None else self.selected.shape[2],
            head_shares=self.chunk.head_shares,
            gathers_heads=self.gathers_heads,
            shares=str(self.chunk.shares),
            attention_chunk_size=self.chunk.attention_chunk_size,
            grid=self.grid,
            num_keys=self.num_keys,
            config=self.ranks.config,
            topology=self.ranks.fingerprint,
        )

    def run(self, q: Tensor) -> State:
        """The state of this rank's queries over the whole cache, without sinks."""
        (query_team, key_team, n), (k, v) = self._planned(q), self.cache[:2]
        queries, spec = self.chunk.queries(query_team, self.spec)
        cell = dict(queries=queries, keys=self.chunk.keys(key_team), backend=self.backend)
        cell["wire"] = wire_dtype(q.dtype, self.ranks.config)
        cell["selected"] = None if self.selected is None else Selected(self.selected, queries)
        if v is None:  # latents travel once
            cell, kv = LatentCell(**cell, expand=self.expand, head_dim_v=self.head_dim_v), (k,)
        else:
            cell, kv = Cell(**cell), (k, v)
        chunks = [HeadChunk.all(spec)] if n == 1 else head_chunks(q.shape[2], k.shape[2], n, spec)
        chunks = [CellForward(cell, chunk, q, kv) for chunk in chunks]
        run_stages(chunks)
        return join_heads([chunk.state for chunk in chunks])

    def _planned(self, q: Tensor) -> tuple[comm.Team, comm.Team, int]:
        k, v, num_keys = self.cache.k, self.cache.v, self.num_keys
        sizes = chunk_sizes(
            self.ranks.size,
            sum(self.chunk.num_queries),
            sum(num_keys) if num_keys else self.chunk.end,
            num_heads=self.whole.shape[2],
            head_dims=(q.shape[3], self.head_dim_v),
            key_numbers=k.shape[2] * (k.shape[3] + (0 if v is None else v.shape[3])),
            bytes_per_word=q.element_size(),
            sends_queries=self.chunk.head_shares is None or self.gathers_heads,
        )
        divided = v is not None and self.chunk.head_shares is None
        return place_on_grid(self.grid, sizes, k.shape[2] if divided else 1, self.ranks)
