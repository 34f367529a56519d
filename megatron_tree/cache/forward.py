"""One run of a model over new tokens of some rows of a sharded KV cache: what its attention layers call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention.cached import tree_decode, tree_prefill
from ..config import TreeConfig
from ..kernels import gather_row
from . import Append, ShardedCache, View

PREFILL_TOKENS = 32  # from here on a pass over one row is a prefill, whose kernels skip what is hidden


@contextlib.contextmanager
def forward_pass(
    store: ShardedCache,
    rows: Sequence[int],
    num_tokens: int,
    *,
    cp_group,
    schedule: str = "auto",
    head_shares: tuple[int, ...] | None = None,
    sharded: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[ForwardPass]:
    """Context of one run of a model over num_tokens new tokens of each of these rows.

    A failure inside removes the tokens again.

    Args:
        head_shares: query heads of every rank of cp_group, whose weights are split; see `tree_decode`.
        sharded: this rank runs its share of one row's tokens, given by `ForwardPass.append.shares`.
        progress: called as progress(layers done, all of them).
    """
    append = store.append(rows, num_tokens, sharded=sharded)
    try:
        yield ForwardPass(store, cp_group, schedule, tuple(rows), append, head_shares, progress)
    except BaseException:
        for row, length in zip(rows, append.first, strict=True):
            store.crop(row, length)
        raise


@dataclass
class ForwardPass:
    """One run of a model over new tokens of some rows: every layer calls `write` and then `attend`, once."""

    store: ShardedCache
    cp_group: object
    schedule: str
    rows: tuple[int, ...]
    append: Append
    head_shares: tuple[int, ...] | None = None
    progress: Callable[[int, int], None] | None = None
    written: set[int] = field(default_factory=set)
    """Layers that have stored their tokens."""
    views: dict[int, View] = field(default_factory=dict)
    """By kind of layer: where the kernels find the rows."""

    @property
    def end(self) -> int:
        """Tokens of the longest row, the new ones among them."""
        return max(self.append.first) + self.append.num_tokens

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's new keys and values, positions already applied.

        k [b, n, h_kv, d], v [b, n, h_kv, d_v]: the new tokens of each row; in a sharded prefill this rank's share of
        the one row's, or one token if it has none.
        """
        kind = self.store.kind_of[layer]
        self.written.add(layer)
        self.store.write(layer, self.append, k, v)
        if kind not in self.views:
            self.views[kind] = self.store.view(kind, self.rows, k.device)

    def held(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All keys and values of the rows that this rank holds, after `write`.

        Returns: ([b, longest, h_kv, d], [b, longest, h_kv, d_v]) in dtype, zeros beyond each row's length; one token of
            zeros where this rank holds none.
        """
        pages, view = self.store.layers[layer], self.views[self.store.kind_of[layer]]
        lengths, paged = view.lengths.tolist(), pages.paged(view.block_table)
        if not max(lengths):
            return tuple(x.new_zeros((len(self.rows), 1, *x.shape[2:]), dtype=dtype) for x in (pages.k, pages.v))
        rows = [gather_row(pages.k, pages.v, paged, i, n, dtype) for i, n in enumerate(lengths)]
        if len(rows) == 1:
            return rows[0]
        pad = torch.nn.utils.rnn.pad_sequence
        return tuple(pad([row[which][0] for row in rows], batch_first=True) for which in (0, 1))

    def attend(
        self,
        layer: int,
        q: Tensor,
        *,
        kv: tuple[Tensor, Tensor] | None = None,
        visible: Tensor | None = None,
        config: TreeConfig | None = None,
        **options,
    ) -> Tensor:
        """Attend to all that the ranks hold of the rows, the new tokens among it. Collective over cp_group.

        Args:
            q: [b, n, h, d]: the new tokens of each row, or this rank's share of them, see `write`. With head_shares
                of this rank's heads; so are the result and sinks.
            kv: keys and values made from `held`, [b, longest, h_kv, d] and [..., d_v], where the cache holds something
                else (latent attention); default what the cache holds.
            visible: bool [b, tokens], tokens of a row up to the end of this pass: False hides one (padding). All rows
                have the same length then.
            config: see `tree_decode`. options: softmax_scale, window_size, softcap, sinks.
        Returns: [b, n, h, d_v] in q's dtype.
        Raises: ValueError as `tree_decode`, and for `visible` of another size or in a sharded prefill.
        """
        run = self._decode
        if self.append.shares is not None:
            run = self._prefill
        elif self.head_shares is not None:
            options["head_shares"] = self.head_shares
            if len(self.rows) == 1 and q.shape[1] >= PREFILL_TOKENS and visible is None and kv is None:
                run = self._prefill_heads
        out = run(layer, q, kv, visible, cp_group=self.cp_group, config=config, **options)
        if self.progress is not None:
            self.progress(len(self.written), len(self.store.layers))
        return out

    def _prefill(self, layer: int, q: Tensor, kv, visible: Tensor | None, **options) -> Tensor:
        if visible is not None:
            raise ValueError("attention_mask: a sequence-sharded prefill takes prompts without padding only")
        store, append, rank = self.store, self.append, self.store.book.rank
        pages, kind = store.layers[layer], store.kind_of[layer]
        own = sum(count for _, count in append.shares[rank])
        num_heads_kv = (pages.k if kv is None else kv[0]).shape[2]
        # queries and partial outputs are as wide as keys and values: send whichever are fewer
        gather_keys = store.book.num_visible(append, kind) * num_heads_kv <= append.num_tokens * q.shape[2]
        segments = store.key_segments(append, kind, of_all_ranks=gather_keys)
        held = sum(segment.length for segment in (segments[rank] if gather_keys else segments))
        if kv is None:
            k, v = gather_row(pages.k, pages.v, pages.paged(self.views[kind].block_table), 0, held, q.dtype)
        else:
            k, v = (x[:, :held] for x in kv)
        out = tree_prefill(q[:, :own], k, v, shares=append.shares, key_segments=segments, **options)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[1] - own))  # a rank without tokens still runs one

    def _prefill_heads(self, layer: int, q: Tensor, kv, visible, **options) -> Tensor:
        """Many tokens of one row, all on every rank, whose heads are sharded."""
        store, kind, first = self.store, self.store.kind_of[layer], self.append.first[0]
        pages, view = store.layers[layer], self.views[kind]
        segments = store.key_segments(self.append, kind, of_all_ranks=False)
        held = sum(segment.length for segment in segments)
        k, v = gather_row(pages.k, pages.v, pages.paged(view.block_table), 0, held, q.dtype)
        return tree_prefill(q, k, v, shares=[[(first, q.shape[1])]], key_segments=segments, **options)

    def _decode(self, layer: int, q: Tensor, kv, visible: Tensor | None, **options) -> Tensor:
        pages, view = self.store.layers[layer], self.views[self.store.kind_of[layer]]
        num_queries, positions = q.shape[1], view.positions
        if kv is None:
            k, v = pages.k, pages.v
            options.update(block_table=view.block_table, k_scale=pages.k_scale, v_scale=pages.v_scale)
        else:
            k, v = kv
            positions = positions[:, : k.shape[1]]
        if visible is not None:
            if visible.shape[1] != self.end:
                raise ValueError(
                    f"attention_mask {list(visible.shape)} must cover all {self.end} slots: "
                    f"{self.append.first[0]} in the cache and {num_queries} new ones"
                )
            seen = visible.gather(1, positions.clamp(max=self.end - 1))
            positions = torch.where(seen, positions, -1)
        if num_queries > 1 or visible is not None or options.get("window_size", (-1, -1)) != (-1, -1):
            first = torch.tensor(self.append.first, device=q.device)[:, None]
            q_positions = first + torch.arange(num_queries, device=q.device)
            options.update(q_positions=q_positions, cache_positions=positions)
        return tree_decode(q, k, v, cache_seqlens=view.lengths, schedule=self.schedule, **options)
