"""Attention of a model's layers over a sharded cache.

- `StepAttention`: new tokens that all ranks have, in decode steps and short or ragged prompts
- `PrefillAttention`: many new tokens of one row, by the kernels of prefills
- layers whose queries see the keys that an index selects (`Index`, `Selection`). Their index keys lie in the pages,
  beside the keys, on the rank that has these. In a step every rank scores its own, and the best of all ranks' lists are
  selected (`tree_select`); a rank gathers its rows among them, no others, and attends. The selection of a prefill is
  positions, under whose mask it attends block by block.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.decode import DecodeOptions, DecodeStep
from ..attention.prefill import tree_prefill, why_not
from ..attention.selection import (
    Blocks,
    segments_of_blocks,
    tokens_after_blocks,
    tokens_of_blocks,
    tree_select,
    tree_select_prefill,
)
from ..attention.shares import slice_of
from ..comm import Ranks
from ..config import TreeConfig
from ..kernels import ACCELERATORS, KVCache
from ..merge import State
from ..plan import chunk_sizes, grids, plan_prefill_grid
from . import Append, ShardedCache, View
from .latent import LatentHeads
from .pages import on_device


class StepAttention:
    """The layers' decode calls in one pass: calls of equal layers are checked and planned once."""

    def __init__(self, store: ShardedCache, schedule: str, head_shares: tuple[int, ...] | None):
        self._store, self._schedule, self._head_shares = store, schedule, head_shares
        self._step = DecodeStep()
        self._paged: dict[tuple, tuple] = {}
        """By what the queries see: the mask, kept so that its id is its own, and fields of the `KVCache`."""

    def local_heads(self, latent: LatentHeads) -> LatentHeads:
        """How this rank's heads read latents, of how all heads do."""
        if self._head_shares is None or len(latent.up) != sum(self._head_shares):
            return latent
        return latent._replace(own=slice_of(self._head_shares, self._store.book.rank))

    def attend(
        self,
        forward,
        layer: int,
        q: Tensor,
        latent: LatentHeads | None,
        visible: Tensor | None,
        config: TreeConfig,
        *,
        attention_chunk_size: int | None = None,
        sinks: Tensor | None = None,
        **options,
    ) -> State:
        """See `ForwardPass.attend`; forward: the pass, for its rows, positions and views."""
        pages, kind, num_queries = self._store.layers[layer], self._store.kind_of[layer], q.shape[1]
        if visible is not None and visible.shape[1] != forward.end:
            raise ValueError(
                f"attention_mask {list(visible.shape)} must cover all {forward.end} slots: "
                f"{forward.append.first[0]} in the cache and {num_queries} new ones"
            )
        k, v, head_dim_v, projection = pages.k, pages.v, None, None
        if v is None and latent is None:
            head_dim_v = pages.head_dim_v
        if latent is not None:
            # most of the keys are new: as many are made as there are queries
            expands = self._head_shares is None and forward.end <= 2 * num_queries
            if expands and latent.pays_to_expand(num_queries):
                (k, v), head_dim_v = latent.expand(self._entries(forward, layer, q.dtype)), None
            else:
                q, projection, v, head_dim_v = latent.absorb(q), latent.values, None, latent.rank
                k = pages.k if pages.joined else self._entries(forward, layer, q.dtype)
        by_position = options.get("window_size", (-1, -1)) != (-1, -1) or options.get("alibi_slopes") is not None
        by_position = by_position or attention_chunk_size is not None
        if k is pages.k:
            key = kind, by_position, id(visible)
            if key not in self._paged:
                self._paged[key] = visible, self._pages_seen(forward, kind, visible, by_position, config)
            cache = KVCache(k, v, pages.k_scale, pages.v_scale, head_dim_v, **self._paged[key][1])
        else:
            view = forward.views[kind]
            seen = self._positions(forward, view, visible, by_position)
            if seen:
                seen["k_positions"] = seen["k_positions"][:, : k.shape[1]]
            cache = KVCache(k, v, head_dim_v=head_dim_v, lengths=view.lengths, **seen)
        options |= {"head_shares": self._head_shares, "schedule": self._schedule}
        call = {"options": DecodeOptions(Ranks.of(forward.cp_group, q.device, config), **options)}
        call |= {"sinks": sinks, "projection": projection}
        if attention_chunk_size is None:
            return self._step.decode(q, cache, **call)
        return self._in_chunks(forward, q, cache, attention_chunk_size, visible, **call)

    def attend_selected(
        self,
        forward,
        layer: int,
        q: Tensor,
        selected: Selection,
        latent: LatentHeads | None,
        config: TreeConfig,
        *,
        sinks: Tensor | None = None,
        **options,
    ) -> State:
        """`attend` to the selected keys only."""
        options |= {"head_shares": self._head_shares, "schedule": self._schedule}
        options = DecodeOptions(Ranks.of(forward.cp_group, q.device, config), **options)
        return attend_in_step(forward, layer, q, selected, latent, self._step, options, sinks)

    def _entries(self, forward, layer: int, dtype: torch.dtype) -> Tensor:
        """This rank's latents and rotary keys: [b, longest row, 1, ...] in dtype, then zeros."""
        pages, view = self._store.layers[layer], forward.views[self._store.kind_of[layer]]
        rows = [pages.row(view.block_table, i, n, dtype)[0][0] for i, n in enumerate(view.lengths.tolist())]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _pages_seen(self, forward, kind: int, visible, by_position: bool, config: TreeConfig) -> dict:
        """What queries see in pages, as fields of `KVCache`."""
        view, shared = forward.views[kind], {}
        reads_shared = self._schedule != "ring" and not (by_position or config.deterministic)
        if view.shared and visible is None and reads_shared:
            shared, view = {"shared": view.shared}, view.rest
        positions = self._positions(forward, view, visible, by_position)
        return shared | positions | {"block_table": view.block_table, "lengths": view.lengths}

    @staticmethod
    def _positions(forward, view, visible: Tensor | None, by_position: bool) -> dict:
        """Positions of queries and keys where lengths don't say what is seen; by_position: a window or slopes."""
        if forward.append.num_tokens == 1 and visible is None and not by_position:
            return {}
        positions, queries = view.positions, view.last_seen(forward.new_positions(view.lengths.device))
        if forward.packed is not None:  # padding sees nothing
            queries = queries.where(forward.packed.inside, -1)
        if visible is not None:
            shown = visible.gather(1, positions.clamp(max=forward.end - 1))
            positions = torch.where(shown, positions, -1)
        return {"q_positions": queries, "k_positions": positions}

    @staticmethod
    def _in_chunks(forward, q: Tensor, cache: KVCache, size: int, visible: Tensor | None, **call) -> State:
        """Each query sees keys of its own chunk of `size` tokens: a call for queries up to where some row's ends."""
        n, first = q.shape[1], forward.append.first
        padding = [0] * len(first) if visible is None else (visible.cumsum(1) == 0).sum(1).tolist()
        starts = [start - hidden for start, hidden in zip(first, padding)]
        cuts = sorted({0, n, *(i for start in starts for i in range(-start % size, n, size))})
        parts = []
        for i, end in itertools.pairwise(cuts):
            begin = [(start + i) // size * size + hidden for start, hidden in zip(starts, padding)]
            outside = cache.k_positions < on_device(torch.tensor(begin), q.device)[:, None]
            positions = cache.q_positions[:, i:end], cache.k_positions.masked_fill(outside, -1)
            part = cache._replace(q_positions=positions[0], k_positions=positions[1])
            parts.append(DecodeStep().decode(q[:, i:end], part, **call))
        outs, lses = zip(*parts)
        return torch.cat(outs, 1), torch.cat(lses, -1)


_BY_POSITION = ("alibi_slopes", "attention_chunk_size", "selected")


class PrefillAttention:
    """The layers' calls of `tree_prefill` in one pass.

    append: the new tokens; sharded, if each rank has the queries of its own, otherwise all ranks have all of them.
    """

    def __init__(self, store: ShardedCache, append: Append, cp_group):
        self._store, self._append, self._cp_group = store, append, cp_group
        self._agreed: set[TreeConfig] = set()

    def select(self, layer: int, view: View, index: Index, *, shares, config: TreeConfig) -> Selection:
        """Positions of the keys, or numbers of the blocks, that this rank's queries select. Collective."""
        store, size = self._store, max(index.block_size, view.block_size)
        segments = store.key_segments(self._append, store.kind_of[layer], of_all_ranks=True, by_position=True)
        local = sum(segment.length for segment in segments[store.book.rank])
        keys = store.layers[layer].index_row(view.block_table, 0, local // view.block_size)
        keys = keys[index.block_size - 1 :: index.block_size, : index.q.shape[-1]]
        options = index.options | {"cp_group": self._cp_group, "config": config}
        where = {"shares": shares, "key_segments": segments, "block_size": size}
        positions = tree_select_prefill(index.q, index.weights, keys[None], **options, **where)
        if view.block_size > 1:  # numbers of blocks, from their first tokens
            positions = positions[..., : 1 - size : size] // size
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
    ) -> State:
        """([1, n, h, d_v], lse [1, h, n]) of this rank's queries [1, n, h, d]. Collective.

        num_heads: query heads of all ranks. shares, options: see `tree_prefill`.
        """
        store, kind = self._store, self._store.kind_of[layer]
        grid, expands = self._plan(layer, q, latent, num_heads, config)
        gathers_keys = grid[1] > 1  # else a rank need not know the keys of others
        by_position = any(options.get(name) is not None for name in _BY_POSITION) or config.deterministic == "ranks"
        by_position = by_position or view.block_size > 1
        segments = store.key_segments(self._append, kind, of_all_ranks=gathers_keys, by_position=by_position)
        if view.block_size > 1:
            segments = segments_of_blocks(segments if gathers_keys else [segments], view.block_size)
            segments = segments if gathers_keys else segments[0]
            if options.get("selected") is None:
                options["selected"] = self._complete_blocks(view, shares, q.device)
        local = segments[store.book.rank] if gathers_keys else segments
        k, v = store.layers[layer].row(view.block_table, 0, sum(segment.length for segment in local), q.dtype)
        options |= {"cp_group": self._cp_group, "config": config, "shares": shares}
        options |= {"key_segments": segments, "grid": grid, "return_lse": True}
        if latent is None:
            return tree_prefill(q, k, v, head_dim_v=store.layers[layer].head_dim_v, **options)
        q, of_latents, finish = latent.prepare(q, expands=expands)
        out, lse = tree_prefill(q, k, v, **of_latents, **options)
        return finish(out), lse

    def _complete_blocks(self, view: View, shares, device) -> Tensor:
        """int32 [1, n, m]: numbers of the blocks that this rank's queries see, all that end up to them."""
        runs = shares[0] if len(shares) == 1 else shares[self._store.book.rank]
        queries = [position for first, count in runs for position in range(first, first + count)]
        last = view.last_seen(on_device(torch.tensor(queries, dtype=torch.int64), device))[:, None]
        end = self._append.first[0] + self._append.num_tokens
        numbers = torch.arange(end // view.block_size, dtype=torch.int32, device=device)
        return torch.where(numbers <= last, numbers, -1)[None]

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
        kind, network = store.kind_of[layer], ranks.network_of_memory
        num_keys = store.book.num_visible(append, kind) // store.block_sizes[kind]
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
                head_dims = q.shape[-1], pages.head_dim_v or numbers // num_heads_kv - q.shape[-1]
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


GATHERED = 1 << 25  # numbers of the rows that are gathered at a time


class Index(NamedTuple):
    """What an indexer computes of new tokens, and how many keys it selects for each."""

    q: Tensor
    """fp32 [b, n, h_i, d_i]."""
    weights: Tensor
    """fp32 [b, n, h_i]."""
    scale: float
    """Of the products of q and the index keys."""
    topk: int
    """Keys, or blocks."""
    blocks: Blocks | None = None
    """Whole blocks of tokens are selected. A page has whole ones, and a complete block's key is in its last token's
    place, which may have more numbers than that."""

    @property
    def block_size(self) -> int:
        return 1 if self.blocks is None else self.blocks.size

    @property
    def options(self) -> dict:
        return {"topk": self.topk, "softmax_scale": self.scale}


class Selection(NamedTuple):
    """The keys that new tokens select, the same for all layers that share it."""

    keys: Tensor
    """int32 [b, n, m], -1: none. Slots of the row on this rank, or positions in a prefill."""
    most: int
    """A query has no more on all ranks together."""


def select_in_step(forward, layer: int, index: Index, visible: Tensor | None, config: TreeConfig) -> Selection:
    """The slots of this rank among the keys that each query selects; forward: the pass, for its rows and views."""
    pages, view = forward.store.layers[layer], forward.views[forward.store.kind_of[layer]]
    size, last = index.block_size, slice(index.block_size - 1, None, index.block_size)
    positions, queries = view.positions, view.last_seen(forward.new_positions(view.lengths.device))
    if forward.packed is not None:  # padding selects nothing
        queries = queries.where(forward.packed.inside, -1)
    if visible is not None:
        positions = positions.masked_fill(~visible.gather(1, positions.clamp(0, forward.end - 1)), -1)
    slots = tree_select(
        *index[:2],
        pages.index_k[:, last, 0, : index.q.shape[-1]],
        **index.options,
        cp_group=forward.cp_group,
        q_positions=queries,
        cache_positions=positions[:, last],
        cache_seqlens=view.lengths // size,
        block_table=view.block_table,
        max_seqlen=forward.end // (view.block_size * size),
        config=config,
    )
    if index.blocks is not None:
        after = _slots_of(tokens_after_blocks(queries, size), view)
        slots = torch.cat((tokens_of_blocks(slots, size), after), -1).to(torch.int32)
    return Selection(slots, min(index.topk * size + size - 1, forward.end))


def _slots_of(positions: Tensor, view: View) -> Tensor:
    """int64 [b, n, m]: this rank's slots with these positions, int64 [b, n, m], -1 for those that it has not."""
    slots = torch.arange(view.positions.shape[1], device=positions.device)
    held = view.positions.where(slots < view.lengths[:, None], torch.iinfo(torch.int64).max)
    if not held.shape[1]:
        return torch.full_like(positions, -1)
    found = torch.searchsorted(held, positions.flatten(1)).clamp(max=held.shape[1] - 1)
    return found.where(held.gather(1, found) == positions.flatten(1), -1).view_as(positions)


def attend_in_step(
    forward, layer: int, q: Tensor, selection: Selection, latent: LatentHeads | None, step: DecodeStep, options, sinks
) -> State:
    """([b, n, h, d_v], lse [b, h, n]) of queries [b, n, h, d], which attend to the slots of `select_in_step`; options:
    of the call."""
    pages, view = forward.store.layers[layer], forward.views[forward.store.kind_of[layer]]
    if latent is None:
        cache = pages.kv_cache(view.block_table, lengths=view.lengths, selected=selection.keys)
        return step.decode(q, cache, options, sinks=sinks)
    absorbed, call = latent.absorb(q), dict(sinks=sinks, projection=latent.values)
    if pages.joined:
        cache = KVCache(pages.k, None, head_dim_v=latent.rank, lengths=view.lengths, block_table=view.block_table)
        return step.decode(absorbed, cache._replace(selected=selection.keys), options, **call)
    size, parts = pages.page_size, []
    strip = max(1, GATHERED // (len(q) * selection.most * absorbed.shape[-1]))  # the same on all ranks
    for i in range(0, q.shape[1], strip):
        slots = selection.keys[:, i : i + strip].long().sort(-1, descending=True).values  # -1 behind the others
        counts = (slots >= 0).sum(-1)
        slots = slots.clamp(min=0)
        page = view.block_table.gather(1, (slots // size).flatten(1)).view_as(slots)
        entries = pages.entries(page.long() * size + slots % size, q.dtype).flatten(0, 1)
        cache = KVCache(entries, None, head_dim_v=latent.rank, lengths=counts.flatten())
        out, lse = step.decode(absorbed[:, i : i + strip].flatten(0, 1)[:, None], cache, options, **call)
        parts.append((out[:, 0].unflatten(0, (len(q), -1)), lse[..., 0].unflatten(0, (len(q), -1)).mT))
    outs, lses = zip(*parts)
    return torch.cat(outs, 1), torch.cat(lses, -1)
