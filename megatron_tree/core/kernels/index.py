"""The index of index-selected attention (DeepSeek-V3.2): every query's best keys of one shard.

The score of key a for query i is, over the index heads h and in fp32,

    I_ia = sum_h w_ih relu(scale * q_ih . k_a)                                  (16)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..merge import NO_ENTRY, ranked
from .kv_cache import KVCache
from .states import triton_for

MOST_SCORES = 1 << 22  # of some queries with all keys of their row
MOST_ENTRIES = 1 << 26  # the same on an accelerator, of all rows
HEADS = 1024  # of queries that are scored at once, at most; their products with a block of keys stay in a core's cache
PRODUCTS, LEAST = 1 << 17, 256  # numbers of these products, and keys of a block at least


def index_scores(q: Tensor, weights: Tensor, k: Tensor, scale: float) -> Tensor:
    """Equation (16): fp32 [n, s] of queries q [n, h, d] with weights [n, h], and keys k [s, d]; under autocast, too."""
    (n, h, d), s = q.shape, k.shape[0]
    q, weights = q.float().reshape(n * h, d), weights.float()[:, None]
    scores = torch.empty((n, s), device=q.device)
    step = max(LEAST, PRODUCTS // max(1, n * h))
    with torch.autocast(q.device.type, enabled=False):
        for some in (slice(i, i + step) for i in range(0, s, step)):
            products = (q @ k[some].float().T).mul_(scale).relu_()
            scores[:, some] = torch.bmm(weights, products.view(n, h, -1))[:, 0]
    return scores


def index_scores_bwd(
    dscores: Tensor, q: Tensor, weights: Tensor, k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [n, h, d], dweights [n, h], dk [s, d]) in fp32 of dscores fp32 [n, s], the gradient of `index_scores`."""
    (n, h, d), s = q.shape, k.shape[0]
    q, weights, k = q.float().reshape(n * h, d), weights.float()[..., None], k.float()
    dq, dweights, dk = torch.zeros_like(q), torch.zeros_like(weights), torch.empty_like(k)
    step = max(LEAST, PRODUCTS // max(1, n * h))
    with torch.autocast(q.device.type, enabled=False):
        for some in (slice(i, i + step) for i in range(0, s, step)):
            products = (q @ k[some].T).mul_(scale).relu_().view(n, h, -1)
            of_keys = dscores[:, some]
            dweights += torch.bmm(products, of_keys[..., None])
            dproducts = (of_keys[:, None] * weights).mul_(scale).masked_fill_(products == 0, 0).view(n * h, -1)
            dq.addmm_(dproducts, k[some])
            dk[some] = dproducts.T @ q
    return dq.view(n, h, d), dweights[..., 0], dk


def best_keys(q: Tensor, weights: Tensor, cache: KVCache, topk: int, scale: float) -> tuple[Tensor, Tensor]:
    """The `topk` best keys of every query among those that it sees: lists of `merge.ranked`, and their slots.

    Args: q [b, n, h, d]; weights [b, n, h]; cache: index keys [b, s, 1, d], or pages of them, with positions.
    Returns: int64 [b, n, m], falling, then `NO_ENTRY`, and int64 [b, n, m]; m is topk, or the shard's slots if less.
    """
    m, triton = min(topk, cache.num_slots), triton_for(q)
    if triton is not None and not triton.index_unsupported(q, cache):
        return _best_entries(triton.index_entries, q, weights, cache, m, scale)
    b, n, h, _ = q.shape
    lists = torch.full((b, n, m), NO_ENTRY, device=q.device)
    slots = torch.zeros((b, n, m), dtype=torch.int64, device=q.device)
    for i in range(b):  # one by one: a row's bits don't depend on the batch
        row = cache.row(i, q.dtype)
        keys, positions = row.k[0, :, 0], row.k_positions[0]
        step = max(1, min(MOST_SCORES // max(1, len(keys)), HEADS // max(1, h)))
        for some in (slice(j, j + step) for j in range(0, n, step)):
            scores = index_scores(q[i, some], weights[i, some], keys, scale)
            seen = (positions >= 0) & (positions <= row.q_positions[0, some, None])
            entries = ranked(scores, positions).masked_fill_(~seen, NO_ENTRY)
            of_row = min(m, len(keys))
            best, slot = entries.topk(of_row)
            lists[i, some, :of_row], slots[i, some, :of_row] = best, slot
    return lists, slots


def _best_entries(index_entries, q: Tensor, weights: Tensor, cache: KVCache, m: int, scale: float):
    """`best_keys` by a kernel that makes the entries of all slots; nothing is looked at on the host."""
    parts, step = [], max(1, MOST_ENTRIES // max(1, len(q) * cache.num_slots))
    for some in (slice(i, i + step) for i in range(0, max(1, q.shape[1]), step)):
        part = cache._replace(q_positions=cache.q_positions[:, some])
        parts.append(index_entries(q[:, some], weights[:, some], part, scale).topk(m))
    return tuple(torch.cat(x, 1) for x in zip(*parts))
