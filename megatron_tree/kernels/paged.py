"""Decoding for backends without a decode kernel: pages are gathered, padding is cut or masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import AttnSpec
from ..merge import merge_packed, pack_state, state_dtype
from .masks import Visible


class PagedKV(NamedTuple):
    """Where the rows of a paged cache are: k [pages, page_size, h_kv, d] and v [pages, page_size, h_kv, d_v].

    block_table: int32 [b, n], the pages of each row, in order. k_scale, v_scale: fp32 [pages, page_size, h_kv] where k
    and v hold 8 bits (int8, fp8): each vector is its scale times what is stored.
    """

    block_table: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class SharedPages(NamedTuple):
    """Pages that several rows begin with; `PagedKV.block_table` has those that follow.

    rows: int64 [m], numbers of the rows. block_table: int32 [1, n], whole pages that all queries see.
    """

    rows: Tensor
    block_table: Tensor


def decode_shared(decode: Callable, q, k, v, own: Tensor, *, shared: Sequence[SharedPages], spec, paged) -> Tensor:
    """The states of whole rows from `own`, those of what follows their shared pages: packed, [b, s_q, h, d_v + 1].

    Pages that rows share are read once: these rows' queries are so many queries of one row. decode: as
    `Backend.attn_decode`.
    """
    for rows, table in shared:
        queries = q[rows].flatten(0, 1)[None]
        lengths = torch.full((1,), table.shape[1] * k.shape[1], device=q.device)
        pages = paged._replace(block_table=table)
        state = decode(queries, k, v, visible=Visible(lengths), spec=spec, paged=pages)
        state = state.view(len(rows), *own.shape[1:])
        own[rows] = merge_packed(torch.stack((state, own[rows])))
    return own


def decode_masked(attn_masked: Callable, q, k, v, *, visible: Visible, spec: AttnSpec, paged: PagedKV | None) -> Tensor:
    """`Backend.attn_decode` by attn_masked(q, k, v, keep=, spec=) -> state, the backend's attention under a mask; with
    ALiBi also bias=.

    Rows go one by one where they are gathered from pages, and where their bits may not depend on the batch as those of
    torch's matrix products do.
    """
    if paged is None and not (spec.deterministic and q.shape[0] > 1):
        k, v, visible = _without_padding(k, v, visible)
        options = dict(keep=visible.mask(k.shape[1], spec), spec=spec)
        if spec.alibi_slopes is not None:
            options["bias"] = visible.bias(spec, state_dtype(q.dtype))
        state = attn_masked(q, k, v, **options)
        return pack_state(*state, state_dtype(q.dtype))
    states = []
    for row in range(q.shape[0]):
        seen, some, of_row = visible.row(slice(row, row + 1)), slice(row, row + 1), spec.batch_row(row)
        if paged is None:
            keys, values = k[some], v[some]
        else:
            keys, values = gather_row(k, v, paged, row, None if seen.lengths is None else int(seen.lengths), q.dtype)
            positions = None if seen.k_positions is None else seen.k_positions[:, : keys.shape[1]]
            seen = Visible(None, seen.q_positions, positions)
        states.append(decode_masked(attn_masked, q[some], keys, values, visible=seen, spec=of_row, paged=None))
    return torch.cat(states)


def gather_row(k, v, paged: PagedKV, row: int, length: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `length` tokens (None: all) of a row of a paged cache: k [1, length, h_kv, d], v [1, length, h_kv, d_v]
    in `dtype`; views where the row's pages lie one after another. Values that begin the keys do so afterwards."""
    size = k.shape[1]
    length = paged.block_table.shape[1] * size if length is None else length
    pages = paged.block_table[row, : -(-length // size)]
    first = int(pages[0]) if len(pages) else 0
    in_order = bool((pages.diff() == 1).all())

    def tokens(x: Tensor) -> Tensor:
        """[length, ...] of x [pages, page_size, ...]."""
        return (x[first : first + len(pages)] if in_order else _index(x, pages)).flatten(0, 1)[:length]

    def gathered(x: Tensor, scale: Tensor | None) -> Tensor:
        return tokens(x) if scale is None else (tokens(x).float() * tokens(scale)[..., None]).to(dtype)

    keys = gathered(k, paged.k_scale)[None]
    return keys, keys[..., : v.shape[-1]] if begins(v, k) else gathered(v, paged.v_scale)[None]


def begins(v: Tensor, k: Tensor) -> bool:
    """Whether values v are the first columns of keys k, in the same memory (latent attention)."""
    same = v.data_ptr() == k.data_ptr() and v.shape[:-1] == k.shape[:-1] and v.stride() == k.stride()
    return same and v.dtype == k.dtype and v.shape[-1] <= k.shape[-1]


def _index(x: Tensor, pages: Tensor) -> Tensor:
    """Some pages of x; torch can't index fp8 on every device, so their bytes are."""
    return x.view(torch.uint8)[pages].view(x.dtype) if x.dtype == torch.float8_e4m3fn else x[pages]


def _without_padding(k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor, Visible]:
    """The cache up to the longest row, with zeros in slots of padding, beyond a row's length or at position -1: NaN may
    lie there. A single row loses them: then its bits don't depend on how it was padded."""
    lengths, positions = visible.lengths, visible.k_positions
    if lengths is not None:
        n = int(lengths.max()) if lengths.numel() else 0
        k, v = k[:, :n], v[:, :n]
        positions = None if positions is None else positions[:, :n]
        lengths = None if n == 0 or int(lengths.min()) == n else lengths
        visible = Visible(lengths, visible.q_positions, positions)
    padding = None if positions is None else positions < 0
    if lengths is not None:
        beyond = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]
        padding = beyond if padding is None else padding | beyond
    if padding is None or not padding.any():
        return k, v, visible
    if len(k) == 1:
        kept = ~padding[0]
        return k[:, kept], v[:, kept], Visible(None, visible.q_positions, positions[:, kept])
    return *(x.masked_fill(padding[..., None, None], 0) for x in (k, v)), visible
