"""Layers whose queries see the keys that an index selects: which they are, and attention to them in a step.

The index keys of a layer lie in its pages, beside the keys, on the rank that has these. In a step every rank scores its
own, and the best of all ranks' lists are selected (`tree_select`); a rank gathers its rows among them, no others, and
attends. The selection of a prefill is positions, under whose mask it attends block by block (prefill_attention.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.decode import DecodeStep
from ..attention.decode_select import tree_select
from ..attention.selection import Blocks, tokens_after_blocks, tokens_of_blocks
from ..config import TreeConfig
from ..kernels import KVCache
from .latent import LatentHeads
from .sharded import View

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
    place."""

    @property
    def block_size(self) -> int:
        return 1 if self.blocks is None else self.blocks.size

    @property
    def options(self) -> dict:
        return {"topk": self.topk, "softmax_scale": self.scale}


class Selection(NamedTuple):
    """The keys that new tokens select, the same for all layers that share it."""

    keys: Tensor
    """int32 [b, n, m], -1 beyond: slots of the row on this rank, or positions in a prefill."""
    most: int
    """A query has no more on all ranks together."""


def select_in_step(forward, layer: int, index: Index, visible: Tensor | None, config: TreeConfig) -> Selection:
    """The slots of this rank among the keys that each query selects; forward: the pass, for its rows and views."""
    pages, view = forward.store.layers[layer], forward.views[forward.store.kind_of[layer]]
    size, last = index.block_size, slice(index.block_size - 1, None, index.block_size)
    positions, queries = view.positions, forward.new_positions(view.lengths.device)
    if forward.packed is not None:  # padding selects nothing
        queries = queries.where(forward.packed.inside, -1)
    if visible is not None:
        positions = positions.masked_fill(~visible.gather(1, positions.clamp(0, forward.end - 1)), -1)
    slots = tree_select(
        *index[:2],
        pages.index_k[:, last, 0],
        **index.options,
        cp_group=forward.cp_group,
        q_positions=queries,
        cache_positions=positions[:, last],
        cache_seqlens=view.lengths // size,
        block_table=view.block_table,
        max_seqlen=forward.end // size,
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
) -> Tensor:
    """[b, n, h, d_v] of queries [b, n, h, d], which attend to the slots of `select_in_step`; options: of the call."""
    pages, view = forward.store.layers[layer], forward.views[forward.store.kind_of[layer]]
    if latent is None:
        cache = pages.kv_cache(view.block_table, lengths=view.lengths, selected=selection.keys)
        return step.decode(q, cache, options, sinks=sinks)[0]
    absorbed, call = latent.absorb(q), dict(sinks=sinks, projection=latent.values)
    if pages.joined:
        cache = KVCache(pages.k, None, head_dim_v=latent.rank, lengths=view.lengths, block_table=view.block_table)
        return step.decode(absorbed, cache._replace(selected=selection.keys), options, **call)[0]
    size, parts = pages.page_size, []
    strip = max(1, GATHERED // (len(q) * selection.most * absorbed.shape[-1]))  # the same on all ranks
    for i in range(0, q.shape[1], strip):
        slots = selection.keys[:, i : i + strip].long()
        counts = (slots >= 0).sum(-1)
        slots = slots.clamp(min=0)
        page = view.block_table.gather(1, (slots // size).flatten(1)).view_as(slots)
        entries = pages.entries(page.long() * size + slots % size, q.dtype).flatten(0, 1)
        cache = KVCache(entries, None, head_dim_v=latent.rank, lengths=counts.flatten())
        out, _ = step.decode(absorbed[:, i : i + strip].flatten(0, 1)[:, None], cache, options, **call)
        parts.append(out[:, 0].unflatten(0, (len(q), -1)))
    return torch.cat(parts, 1)
