"""Attention of many new tokens of one row over a sharded cache, by the kernels of prefills."""

from __future__ import annotations

from torch import Tensor

from ..attention.prefill import tree_prefill, why_not
from ..attention.selection import tree_select_prefill
from ..comm import Ranks
from ..config import TreeConfig
from ..kernels import ACCELERATORS
from ..plan import chunk_sizes, grids, plan_prefill_grid
from . import Append, ShardedCache, View
from .latent import LatentHeads
from .selected_attention import Index, Selection

_BY_POSITION = ("alibi_slopes", "attention_chunk_size", "selected")


class PrefillAttention:
    """The layers' calls of `tree_prefill` in one pass.

    append: the new tokens; sharded, if each rank has the queries of its own, otherwise all ranks have all of them.
    """

    def __init__(self, store: ShardedCache, append: Append, cp_group):
        self._store, self._append, self._cp_group = store, append, cp_group
        self._agreed: set[TreeConfig] = set()

    def select(self, layer: int, view: View, index: Index, *, shares, config: TreeConfig) -> Selection:
        """Positions of the keys that this rank's queries select. All ranks' index keys are gathered. Collective."""
        store = self._store
        segments = store.key_segments(self._append, store.kind_of[layer], of_all_ranks=True, by_position=True)
        local = sum(segment.length for segment in segments[store.book.rank])
        keys = store.layers[layer].index_row(view.block_table, 0, local)[index.block_size - 1 :: index.block_size]
        options = index.options | {"cp_group": self._cp_group, "config": config}
        where = {"shares": shares, "key_segments": segments, "block_size": index.block_size}
        positions = tree_select_prefill(index.q, index.weights, keys[None], **options, **where)
        return Selection(positions, positions.shape[-1])

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
        grid, expands = self._plan(layer, q, latent, num_heads, config)
        gathers_keys = grid[1] > 1  # else a rank need not know the keys of others
        by_position = any(options.get(name) is not None for name in _BY_POSITION) or config.deterministic == "ranks"
        segments = store.key_segments(self._append, kind, of_all_ranks=gathers_keys, by_position=by_position)
        local = segments[store.book.rank] if gathers_keys else segments
        k, v = store.layers[layer].row(view.block_table, 0, sum(segment.length for segment in local), q.dtype)
        options |= {"cp_group": self._cp_group, "config": config, "shares": shares}
        options |= {"key_segments": segments, "grid": grid}
        if latent is None:
            return tree_prefill(q, k, v, **options)
        q, of_latents, finish = latent.prepare(q, expands=expands)
        return finish(tree_prefill(q, k, v, **of_latents, **options))

    def _plan(
        self, layer: int, q: Tensor, latent: LatentHeads | None, num_heads: int, config: TreeConfig
    ) -> tuple[tuple[int, int], bool]:
        """(grid, whether keys and values are made of latents), the same on all ranks."""
        append, store, pages = self._append, self._store, self._store.layers[layer]
        ranks = Ranks.of(self._cp_group, q.device, config)
        if config not in self._agreed:
            with ranks.call("tree_prefill") as call:
                call.agree(config=config, topology=ranks.fingerprint)
                network = ranks.network_of_memory
            self._agreed.add(config)
        network, num_keys = ranks.network_of_memory, store.book.num_visible(append, store.kind_of[layer])
        shares_heads = append.shares is None  # the queries' heads are sharded, not their tokens
        num_heads_kv, world, sizes, expands = pages.k.shape[2], store.book.world, [], {}
        numbers = sum(x[0, 0].numel() for x in (pages.k, pages.v) if x is not None)  # of a token
        for a, b in grids(world):
            # queries that meet a key on a rank; where heads are sharded, a rank can make keys of its own heads only
            meeting = append.num_tokens // b if not shares_heads else append.num_tokens if a == 1 else 1
            # accelerators always make keys: their kernels for prefill take heads of 256 numbers at most
            expands[a, b] = (
                latent is not None
                and config.deterministic != "ranks"
                and (q.device.type in ACCELERATORS or latent.pays_to_expand(meeting))
            )
            if latent is None:
                head_dims = q.shape[-1], numbers // num_heads_kv - q.shape[-1]
            else:
                head_dims = (q.shape[-1], latent.head_dim_v) if expands[a, b] else (numbers, latent.rank)
            size = chunk_sizes(
                world,
                append.num_tokens,
                num_keys,
                num_heads=num_heads,
                head_dims=head_dims,
                key_numbers=numbers,
                bytes_per_word=q.element_size(),
                sends_queries=not shares_heads or q.shape[2] < num_heads,
            )
            refused = why_not((a, b), shares_heads=shares_heads, num_heads_kv=num_heads_kv, expands=expands[a, b])
            sizes.append(None if refused or (a > 1 and config.deterministic == "ranks") else size)
        plan = plan_prefill_grid(tuple(sizes), topology=network.topology, placement=network.placement)
        return plan.grid, expands[plan.grid]
