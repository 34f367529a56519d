"""A decode step from pages over rows of different lengths, three queries each, and the float64 oracle of it."""

import torch
import torch.distributed as dist

from megatron_tree.core.cache import quantize
from support.decoding import cache_of, cached_oracle, decode_inputs

LENGTHS = (0, 3, 17, 40)
QUERIES = 3
LONGEST = max(LENGTHS) + QUERIES


def ragged_rows(rank, world, form, page_size, dtype="auto"):
    """(arguments of tree_decode, (out, lse)); form: heads, head_dim, head_dim_v, options of the call."""
    heads, d, d_v, options = form
    q, k, v = decode_inputs(4, QUERIES, LONGEST, heads, d, d_v, torch.float32)
    cache, first_row = cache_of(rank, world, options, page_size, dtype)
    rows = [first_row, *(cache.book.add() for _ in LENGTHS[1:])]
    for i, length in enumerate(LENGTHS):
        if length:
            cache.write(0, cache.append(rows[i : i + 1], length), k[[i], :length], v[[i], :length])
    new = torch.tensor(LENGTHS)[:, None] + torch.arange(QUERIES)
    at = new[..., None, None]
    cache.write(0, cache.append(rows, QUERIES), *(x.gather(1, at.expand(-1, -1, *x.shape[2:])) for x in (k, v)))
    view, pages = cache.view(0, rows, "cpu"), cache.layers[0]
    call = dict(q=q, k_cache=pages.k, v_cache=pages.v, cp_group=dist.group.WORLD, block_table=view.block_table)
    call |= dict(cache_seqlens=view.lengths, k_scale=pages.k_scale, v_scale=pages.v_scale)
    call |= dict(q_positions=new, cache_positions=view.positions, **options)
    if dtype != "auto":
        stored = torch.int8 if dtype == "int8" else torch.float8_e4m3fn
        k, v = (y.double() * scale[..., None] for y, scale in (quantize(x, stored) for x in (k, v)))
    ends = [n + QUERIES for n in LENGTHS]
    truth = [cached_oracle(q[[i]], k[[i], :end], v[[i], :end], end - QUERIES, **options) for i, end in enumerate(ends)]
    return call, tuple(map(torch.cat, zip(*truth)))
