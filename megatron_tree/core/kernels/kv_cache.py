"""A shard of a KV cache as decode kernels read it; and decoding for backends without a decode kernel, row by row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..merge import pack_state, state_dtype
from ..spec import AttnSpec
from .blocks import alibi_bias, window_mask
from .states import merge_packed

MOST_GATHERED = 1 << 25  # numbers of keys that are copied at a time


class SharedPages(NamedTuple):
    """Pages that several rows begin with; `KVCache.block_table` has those that follow.

    rows: int64 [m], numbers of the rows. block_table: int32 [1, n], whole pages that all queries see.
    """

    rows: Tensor
    block_table: Tensor


class KVCache(NamedTuple):
    """One layer's keys and values on one rank, dense or in pages, and what the queries of a decode call see of them.

    A query sees slot s of its row if s < lengths[row], and, with positions, if 0 <= the slot's position <= the
    query's, within the window. Nothing given: it sees all slots. With `selected` it sees those slots alone.
    """

    k: Tensor
    """[b, s, h_kv, d], or with a block_table pages [pages, page_size, h_kv, d]."""
    v: Tensor | None
    """[b, s, h_kv, d_v], or pages; None: the first head_dim_v numbers of a key are its value (latents)."""
    k_scale: Tensor | None = None
    """fp32 [pages, page_size, h_kv] for pages in 8 bits: a key is its scale times what is stored; v_scale likewise."""
    v_scale: Tensor | None = None
    head_dim_v: int | None = None
    lengths: Tensor | None = None
    """int [b]: valid leading slots of each row."""
    q_positions: Tensor | None = None
    """int64 [b, s_q], with k_positions."""
    k_positions: Tensor | None = None
    """int64 [b, s]; -1 hides a slot."""
    block_table: Tensor | None = None
    """int32 [b, n]: the pages of each row, in order; s = n * page_size."""
    shared: Sequence[SharedPages] = ()
    """Pages before block_table's, read once for all their rows; lengths and positions leave them out."""
    selected: Tensor | None = None
    """int32 [b, s_q, m]: the slots of its row that each query sees, each once; -1: none. Without positions."""

    @property
    def values(self) -> Tensor:
        """v, or the view of k that holds the values."""
        return self.k[..., : self.head_dim_v] if self.v is None else self.v

    @property
    def num_slots(self) -> int:
        """Slots of a row."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def needs_mask(self) -> bool:
        """Whether torch's kernels need a mask. Rows that are gathered from pages are cut to their lengths."""
        if self.selected is not None:
            return True
        return self.k_positions is not None or (self.lengths is not None and self.block_table is None)

    def row(self, row: int, dtype: torch.dtype, length: int | None = None) -> KVCache:
        """One row as a dense cache of its first `length` tokens, by default all valid ones; without shared pages.

        Pages are gathered, in `dtype`, or viewed where they lie one after another.
        """
        if length is None:
            length = self.num_slots if self.lengths is None else int(self.lengths[row])
        some, q_positions, k_positions = slice(row, row + 1), self.q_positions, self.k_positions
        if q_positions is not None:
            q_positions, k_positions = q_positions[some], k_positions[some, :length]
        if self.block_table is None:
            k, v = (None if x is None else x[some, :length] for x in (self.k, self.v))
        else:
            k, v = self._gathered(row, length, dtype)
        return KVCache(k, v, None, None, self.head_dim_v, None, q_positions, k_positions)

    def _gathered(self, row: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        numbers = self.block_table[row, : -(-length // self.k.shape[1])]
        if (numbers.diff() == 1).all():
            first = int(numbers[0]) if len(numbers) else 0
            numbers = slice(first, first + len(numbers))
        return tuple(
            None if pages is None else _tokens(pages, scale, numbers, length, dtype)[None]
            for pages, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )

    def with_selected(self, queries: slice, dtype: torch.dtype) -> KVCache:
        """The selected slots of some of the b * s_q queries as a dense cache, a row of it for every query, in which an
        entry -1 is a slot at position -1. Pages in 8 bits get this dtype."""
        b, s_q, _ = self.selected.shape
        selected = self.selected.flatten(0, 1)[queries].long()
        if 0 in self.k.shape[:2]:
            selected = selected[:, :0]
        row = torch.arange(b * s_q, device=selected.device)[queries] // s_q
        page, at = row[:, None].expand_as(selected), selected.clamp(min=0)
        if self.block_table is not None:
            size = self.k.shape[1]
            page, at = self.block_table[page, at // size].long(), at % size
            page = page.where(selected >= 0, 0)
        scales = self.k_scale, self.v_scale
        k, v = (None if x is None else _slots(x, scale, page, at, dtype) for x, scale in zip((self.k, self.v), scales))
        positions = dict(q_positions=selected.new_zeros(len(selected), 1), k_positions=selected.clamp(max=0))
        return KVCache(k, v, head_dim_v=self.head_dim_v, **positions)

    def mask(self, spec: AttnSpec) -> Tensor | None:
        """Of a dense cache, bool [b, 1 or s_q, s]: what each query sees; None for everything."""
        keep = None
        if self.k_positions is not None:
            keep = window_mask(self.q_positions, self.k_positions, spec) & (self.k_positions >= 0)[:, None]
        if self.lengths is not None:
            valid = (torch.arange(self.num_slots, device=self.k.device) < self.lengths[:, None])[:, None]
            keep = valid if keep is None else keep & valid
        return keep

    def without_padding(self) -> KVCache:
        """A dense cache up to its longest row, with zeros in slots of padding, beyond a row's length or at position -1:
        NaN may lie there. A single row loses them: then its bits don't depend on how it was padded."""
        k, v, lengths, positions = self.k, self.v, self.lengths, self.k_positions
        if lengths is not None:
            n = int(lengths.max()) if lengths.numel() else 0
            k, v, positions = (None if x is None else x[:, :n] for x in (k, v, positions))
            lengths = None if n == 0 or int(lengths.min()) == n else lengths
        padding = None if positions is None else positions < 0
        if lengths is not None:
            beyond = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]
            padding = beyond if padding is None else padding | beyond
        if padding is not None and padding.any():
            if len(k) == 1:
                kept, lengths = ~padding[0], None
                k, v, positions = (None if x is None else x[:, kept] for x in (k, v, positions))
            else:
                k, v = (None if x is None else x.masked_fill(padding[..., None, None], 0) for x in (k, v))
        return self._replace(k=k, v=v, lengths=lengths, k_positions=positions)


def _slots(pages: Tensor, scale: Tensor | None, page: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Slots `at` of pages `page`, [n, m] each: [n, m, h_kv, d]; with a scale they get this dtype."""
    if pages.dtype == torch.float8_e4m3fn:  # torch can't index it on every device
        x = pages.view(torch.uint8)[page, at].view(pages.dtype)
    else:
        x = pages[page, at]
    return x if scale is None else (x.float() * scale[page, at][..., None]).to(dtype)


def _tokens(pages: Tensor, scale: Tensor | None, numbers: Tensor | slice, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` tokens [length, h_kv, d] of some pages; with a scale they get this dtype."""
    if pages.dtype == torch.float8_e4m3fn:  # torch can't index it on every device
        x = pages.view(torch.uint8)[numbers].view(pages.dtype)
    else:
        x = pages[numbers]
    if scale is not None:
        x = (x.float() * scale[numbers][..., None]).to(dtype)
    return x.flatten(0, 1)[:length]


def decode_shared(decode: Callable, q: Tensor, cache: KVCache, spec: AttnSpec, state: Tensor) -> Tensor:
    """The states of whole rows, packed [b, s_q, h, d_v + 1], from `state`, that of what follows their shared pages.

    Pages that rows share are read once: these rows' queries are so many queries of one row. decode: as
    `Backend.attn_decode`.
    """
    for rows, table in cache.shared:
        lengths = torch.full((1,), table.shape[1] * cache.k.shape[1], device=q.device)
        pages = KVCache(*cache[:4], cache.head_dim_v, lengths, block_table=table)
        of_pages = decode(q[rows].flatten(0, 1)[None], pages, spec).view(len(rows), *state.shape[1:])
        state[rows] = merge_packed(torch.stack((of_pages, state[rows])))
    return state


def decode_gathered(decode: Callable, q: Tensor, cache: KVCache, spec: AttnSpec) -> Tensor:
    """`Backend.attn_decode` of selected slots by copies of them: every query is then a row of its own, with a cache
    that is dense. decode: as `Backend.attn_decode`, for dense caches."""
    rows, size = q.flatten(0, 1)[:, None], cache.selected.shape[2] * cache.k.shape[2] * cache.k.shape[3]
    step = max(1, MOST_GATHERED // max(1, size))
    parts = (slice(i, i + step) for i in range(0, max(1, len(rows)), step))
    states = [decode(rows[part], cache.with_selected(part, q.dtype), spec) for part in parts]
    return torch.cat(states).view(*q.shape[:3], -1)


def decode_masked(attn_masked: Callable, q: Tensor, cache: KVCache, spec: AttnSpec) -> Tensor:
    """`Backend.attn_decode` by attn_masked(q, k, v, keep=, spec=) -> state, the backend's attention under a mask; with
    ALiBi also bias=.

    Rows go one by one where they are gathered from pages, and where their bits may not depend on the batch as those of
    torch's matrix products do.
    """
    if cache.selected is not None:
        return decode_gathered(functools.partial(decode_masked, attn_masked), q, cache, spec)
    if cache.block_table is not None or (spec.deterministic and q.shape[0] > 1):
        rows = range(q.shape[0])
        parts = [(q[i : i + 1], cache.row(i, q.dtype), spec.batch_row(i)) for i in rows]
        return torch.cat([decode_masked(attn_masked, *part) for part in parts])
    cache = cache.without_padding()
    options = dict(keep=cache.mask(spec), spec=spec)
    if spec.alibi_slopes is not None:
        options["bias"] = alibi_bias(spec, cache.q_positions, cache.k_positions, state_dtype(q.dtype))
    return pack_state(*attn_masked(q, cache.k, cache.values, **options), state_dtype(q.dtype))


def begins(v: Tensor, k: Tensor) -> bool:
    """Whether values v are the first columns of keys k, in the same memory (latent attention)."""
    same = v.data_ptr() == k.data_ptr() and v.shape[:-1] == k.shape[:-1] and v.stride() == k.stride()
    return same and v.dtype == k.dtype and v.shape[-1] <= k.shape[-1]
