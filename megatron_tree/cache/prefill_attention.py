"""Attention of many new tokens of one row over a sharded cache, by the kernels of prefills."""

from __future__ import annotations

from torch import Tensor

from ..attention.prefill import tree_prefill
from ..attention.topology import GroupTopology
from ..comm import collective_call
from ..config import TreeConfig
from . import Append, ShardedCache, View
from .chunks import ChunkPlan, plan_chunk
from .latent import LatentHeads


class PrefillAttention:
    """The layers' calls of `tree_prefill` in one pass.

    append: the new tokens; sharded, if each rank has the queries of its own, otherwise all ranks have all of them.
    """

    def __init__(self, store: ShardedCache, append: Append, cp_group):
        self._store, self._append, self._cp_group = store, append, cp_group
        self._nets: dict[TreeConfig, GroupTopology] = {}

    def attend(
        self,
        layer: int,
        view: View,
        q: Tensor,
        latent: LatentHeads | None,
        num_heads: int,
        *,
        shares,
        config,
        **options,
    ) -> Tensor:
        """[1, n, h, d_v] of this rank's queries [1, n, h, d]. Collective.

        num_heads: query heads of all ranks. shares, options: see `tree_prefill`.
        """
        store, kind = self._store, self._store.kind_of[layer]
        plan = self._plan(layer, q, latent, num_heads, config)
        by_position = any(options.get(name) is not None for name in ("alibi_slopes", "attention_chunk_size"))
        segments = store.key_segments(self._append, kind, of_all_ranks=plan.gathers_keys, by_position=by_position)
        local = segments[store.book.rank] if plan.gathers_keys else segments
        k, v = store.layers[layer].row(view.block_table, 0, sum(segment.length for segment in local), q.dtype)
        options |= {"cp_group": self._cp_group, "config": config, "shares": shares}
        options |= {"key_segments": segments, "grid": plan.grid}
        if latent is None:
            return tree_prefill(q, k, v, **options)
        q, of_latents, finish = latent.prepare(q, expands=plan.expands)
        return finish(tree_prefill(q, k, v, **of_latents, **options))

    def _plan(self, layer: int, q: Tensor, latent, num_heads: int, config: TreeConfig) -> ChunkPlan:
        append, store = self._append, self._store
        if config not in self._nets:
            with collective_call("tree_prefill", self._cp_group, config) as call:
                GroupTopology.of(self._cp_group, q.device, config)  # what one rank raises, all raise
                call.start()
                self._nets[config] = GroupTopology.over_cache(self._cp_group, q.device, config)
        return plan_chunk(
            q,
            store.layers[layer],
            latent,
            num_queries=append.num_tokens,
            num_keys=store.book.num_visible(append, store.kind_of[layer]),
            num_heads=num_heads,
            shares_heads=append.shares is None,
            net=self._nets[config],
        )
