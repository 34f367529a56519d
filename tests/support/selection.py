"""Index-selected attention on ranks: inputs whose scores are exact, shards of them, and the float64 oracle."""

import torch
import torch.distributed as dist

from megatron_tree import energy
from megatron_tree.config import AttnSpec
from support.paging import paged

INDEX = 3, 4  # heads and head_dim


def index_inputs(batch, n, total, seed=0, values=3):
    """index_q, index_weights and index_k in whole numbers: scores are exact in fp32, and many of them are equal."""
    g = torch.Generator().manual_seed(seed)
    heads, d = INDEX
    shapes = (batch, n, heads, d), (batch, n, heads), (batch, total, d)
    return [torch.randint(-values, values + 1, shape, generator=g).float() for shape in shapes]


def positions_of(rank, owners, lengths):
    """Positions [b, s_local] of the slots of a rank, backwards, and -1 beyond the rows' lengths. owners [total]."""
    mine = (owners == rank).nonzero()[:, 0].flip(0)
    return torch.stack([mine.where(mine < length, -1) for length in lengths])


def held(x, positions):
    """x [b, total, ...] at positions [b, s]; NaN at -1."""
    index = positions.clamp(min=0).unflatten(1, (-1, *(1 for _ in x.shape[2:]))).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index).masked_fill((positions < 0).unflatten(1, (-1, *(1 for _ in x.shape[2:]))), float("nan"))


def oracle_keep(index, topk, q_positions, lengths, scale=1.0):
    """bool [b, n, total]: the selected keys."""
    places = torch.arange(index[2].shape[1])
    keep = (places <= q_positions[..., None]) & (places < torch.tensor(lengths)[:, None, None])
    return energy.selected(*(x.double() for x in index), topk, keep, scale)


def oracle(q, k, v, keep, sinks=None):
    spec = AttnSpec(softmax_scale=q.shape[-1] ** -0.5)
    return energy.attention(*(x.double() for x in (q, k, v)), spec=spec, keep=keep, sinks=sinks)


def selected_positions(rows, positions):
    """bool-like int32 [b, n, total of positions + 1]: how often each position is among this rank's selected slots."""
    found = positions[torch.arange(len(rows))[:, None, None], rows.clamp(min=0).long()]
    return found.where(rows >= 0, -1)


def chosen_by_all(rows, positions, total):
    """int32 [b, n, total]: how many ranks have selected each position."""
    counts = torch.zeros(*rows.shape[:2], total + 1, dtype=torch.int32)
    if rows.shape[2]:
        counts.scatter_add_(2, selected_positions(rows, positions) % (total + 1), torch.ones_like(rows))
    dist.all_reduce(counts)
    return counts[..., :total]


def in_pages(x, positions, size=4):
    """(pages, block table, cache_seqlens, positions of its slots) of x [b, s, ...]; a page of nothing if s is 0."""
    length, missing = x.shape[1], -x.shape[1] % size or size * (x.shape[1] == 0)
    x = torch.cat((x, x.new_full((len(x), missing, *x.shape[2:]), float("nan"))), 1)
    positions = torch.nn.functional.pad(positions, (0, missing), value=-1)
    return *paged(x, size), torch.full((len(x),), length), positions
