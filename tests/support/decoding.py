"""Attention over a sharded cache on ranks: inputs, the float64 oracle, and chunks of a prompt."""

import torch
import torch.distributed as dist

from megatron_tree import tree_prefill
from megatron_tree.core import energy
from megatron_tree.core.cache import ShardedCache
from megatron_tree.core.spec import AttnSpec
from support.attention import distances, slopes_of


def decode_inputs(batch, s_q, total, heads=(4, 2), d=8, d_v=8, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    h, h_kv = heads
    shapes = ((s_q, h, d), (total, h_kv, d), (total, h_kv, d_v))
    return [torch.randn(batch, *s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def decode_oracle(q, k, v, keep, *, softcap=0.0, sinks=None):
    spec = AttnSpec(softmax_scale=q.shape[-1] ** -0.5, softcap=softcap)
    q, k, v = (x.double() for x in (q, k, v))
    return energy.attention(q, k, v, spec=spec, keep=keep, sinks=None if sinks is None else sinks.double())


def cached_oracle(q, k, v, first, *, sinks=None, alibi_slopes=None, attention_chunk_size=None, **mask):
    """(out, lse) of queries [b, n, h, d] at position `first` and later over keys from 0 on."""
    spec = AttnSpec(softmax_scale=q.shape[-1] ** -0.5, alibi_slopes=slopes_of(alibi_slopes), **mask)
    positions = torch.arange(first, first + q.shape[1]), torch.arange(k.shape[1])
    options = dict(spec=spec, keep=energy.visible(*positions, spec), distance=distances(*positions))
    if attention_chunk_size:
        of_queries, of_keys = (x // attention_chunk_size for x in positions)
        options["keep"] &= of_queries[:, None] == of_keys
    options["sinks"] = None if sinks is None else sinks.double()
    return energy.attention(*(x.double() for x in (q, k, v)), **options)


def same_everywhere(x):
    """Whether every rank holds the same bits."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return all(torch.equal(parts[0], p) for p in parts)


def cache_of(rank, world, options, page_size, dtype="auto"):
    left = options.get("window_size", (-1, -1))[0]
    cache = ShardedCache([None if left < 0 else left + 1], rank=rank, world=world, page_size=page_size, dtype=dtype)
    return cache, cache.book.add()


def prefill_chunk(cache, row, q, k, v, options, grid=None):
    """Append a chunk [1, n, ...] that every rank knows; returns this rank's (output, positions in the chunk)."""
    rank, append = cache.book.rank, cache.append([row], q.shape[1], sharded=True)
    first = append.first[0]
    mine = [p - first for start, count in append.shares[rank] for p in range(start, start + count)]
    given = torch.tensor(mine or [0])  # as a model does that has to run one token
    cache.write(0, append, k[:, given], v[:, given])
    view, pages = cache.view(0, [row], "cpu"), cache.layers[0]
    keys, values = pages.row(view.block_table, 0, int(view.lengths[0]), q.dtype)
    by_position = not options.keys().isdisjoint(("alibi_slopes", "attention_chunk_size"))
    gathers_keys = grid is not None and grid[1] > 1
    segments = cache.key_segments(append, 0, of_all_ranks=gathers_keys, by_position=by_position)
    q = q[:, torch.tensor(mine, dtype=torch.int64)]
    shares = dict(shares=append.shares, key_segments=segments, grid=grid)
    return tree_prefill(q, keys, values, cp_group=dist.group.WORLD, **shares, **options), mine
