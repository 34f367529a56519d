"""Attention of new tokens that all ranks have over a sharded cache: decode steps, and short or ragged prompts."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..attention.decode import DecodeOptions, DecodeStep
from ..attention.head_shares import slice_of
from ..comm import Ranks
from ..config import TreeConfig
from ..kernels import KVCache
from ..merge import State
from . import ShardedCache
from .latent import LatentHeads
from .pages import on_device
from .selected_attention import Selection, attend_in_step


class StepAttention:
    """The layers' decode calls in one pass: those of equal layers are checked and planned once."""

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
        if latent is not None:
            # most of the keys are new: as many are made as there are queries
            expands = self._head_shares is None and forward.end <= 2 * num_queries
            if expands and latent.pays_to_expand(num_queries):
                k, v = latent.expand(self._entries(forward, layer, q.dtype))
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
    ) -> Tensor:
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
        positions, queries = view.positions, forward.new_positions(view.lengths.device)
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
