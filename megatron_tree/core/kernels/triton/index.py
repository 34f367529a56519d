"""The index of index-selected attention: the entries of `merge.ranked` of every query and slot of a shard."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_cache import KVCache
from . import configs, host
from .common import dot
from .decode import unit_rows

WIDE = 512  # bytes of a head or key; of up to so many 64 are in a tile, else 32
MAX_DIM = 256


@triton.jit(do_not_specialize=["num_slots", "num_queries", "k_pos_stride", "table_stride"])
def index_kernel(
    Q, W, K, Q_POS, K_POS, LENGTHS, BLOCK_TABLE, ENTRIES, num_slots, num_queries, k_strides, k_pos_stride, table_stride,
    scale, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, N: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Q [b, n, H, D], W [b, n, H], fp32, and Q_POS [b, n] are contiguous; ENTRIES int64 [b, n, num_slots]."""
    slot = tl.program_id(0) * N + tl.arange(0, N)
    b = tl.program_id(2).to(tl.int64)
    query = b * num_queries + tl.program_id(1)
    end = num_slots
    if LENGTHS is not None:
        end = tl.minimum(end, tl.load(LENGTHS + b).to(tl.int32))
    k_pos = tl.load(K_POS + b * k_pos_stride + slot, mask=slot < end, other=-1)
    seen = (k_pos >= 0) & (k_pos <= tl.load(Q_POS + query))
    if PAGE > 0:
        page = tl.load(BLOCK_TABLE + b * table_stride + slot // PAGE, mask=seen, other=0).to(tl.int64)
        at = page * k_strides[0] + (slot % PAGE) * k_strides[1]
    else:
        at = b * k_strides[0] + slot.to(tl.int64) * k_strides[1]
    c = tl.arange(0, COLS)
    k = tl.load(K + at[:, None] + c[None, :], mask=seen[:, None] & (c < D)[None, :], other=0.0)
    total = tl.zeros((N,), tl.float32)
    for first in range(0, H, ROWS):
        h = first + tl.arange(0, ROWS)
        q = tl.load(Q + (query * H + h)[:, None] * D + c[None, :], mask=(h < H)[:, None] & (c < D)[None, :], other=0.0)
        s = dot(q, tl.trans(k.to(q.dtype)), tl.zeros((ROWS, N), tl.float32))
        w = tl.load(W + query * H + h, mask=h < H, other=0.0)
        total += tl.sum(tl.maximum(s * scale, 0.0) * w[:, None], 0)  # (16)
    bits = tl.where(total == 0.0, 0.0, total).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    entry = (bits.to(tl.int64) << 32) + (0xFFFFFFFF - k_pos)
    nothing = tl.full((N,), 1, tl.int64) << 63
    tl.store(ENTRIES + query * num_slots + slot, tl.where(seen, entry, nothing), mask=slot < num_slots)


def index_unsupported(q: Tensor, cache: KVCache) -> bool:
    """Whether the kernel can't take these queries [b, n, h, d] and index keys."""
    narrow = {q.dtype, cache.k.dtype} <= set(host.DTYPES) and q.shape[3] <= MAX_DIM
    return not narrow or max(q.shape[:2]) > host.MAX_BATCH


@host.on_its_device
def index_entries(q: Tensor, weights: Tensor, cache: KVCache, scale: float) -> Tensor:
    """int64 [b, n, slots] of queries [b, n, h, d] and weights [b, n, h]; `NO_ENTRY` where a query doesn't see a slot.

    cache: index keys [b, s, 1, d], or pages of them, with positions.
    """
    (b, n, h, d), slots, k = q.shape, cache.num_slots, host.unit_last_stride(cache.k)
    entries = torch.empty((b, n, slots), dtype=torch.int64, device=q.device)
    if not entries.numel():
        return entries
    cols = max(16, configs.power_of_2(d))
    side = 64 if cols * q.element_size() <= WIDE else 32
    table, k_positions = (x if x is None else unit_rows(x) for x in (cache.block_table, cache.k_positions))
    index_kernel[(triton.cdiv(slots, side), n, b)](
        Q=q.contiguous(), W=weights.float().contiguous(), K=k, Q_POS=cache.q_positions.contiguous(), K_POS=k_positions,
        LENGTHS=None if cache.lengths is None else cache.lengths.contiguous(), BLOCK_TABLE=table, ENTRIES=entries,
        num_slots=slots, num_queries=n, k_strides=k.stride()[:2], k_pos_stride=k_positions.stride(0),
        table_stride=0 if table is None else table.stride(0), scale=scale,
        H=h, D=d, ROWS=min(side, max(16, configs.power_of_2(h))), COLS=cols, N=side,
        PAGE=0 if table is None else k.shape[1],
    )  # fmt: skip
    return entries
