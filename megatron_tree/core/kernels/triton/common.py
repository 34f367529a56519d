"""Device functions that the kernels share: products, loads of tiles, masks and dropout.

A kernel gets a tensor [b, s, h, d] and the strides of its first three axes, of lse [b, h, s] of the first two; the last
axis is adjacent in memory. The base of a head is computed in 64 bits (`head_of`), then base + row * stride + columns.
head_dim is D for q and k, and E for v and out. Tiles have powers of two as their sides, so D columns are covered by two
of them, D0 + D1 (192 = 128 + 64; D1 is 0 where one suffices), and E columns by E0 + E1: q0 is the tile of q's
first D0 columns, q1 that of the next D1.

DUAL: tensors are dual (duals.py), D values and then D tangents. Then q0 is the tile of q's values and q1 that of its
tangents, D0 = D1 columns each. Where something has no tangent, or no second tile, the first stands for it, unread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...dropout import ROUNDS as PHILOX_ROUNDS

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ROUNDS = tl.constexpr(PHILOX_ROUNDS)
UNBOUNDED = 1 << 30  # an infinite side of a window


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr = "ieee"):
    """acc + a @ b. PRECISION: of fp32, "ieee" or "tf32x3", three products of TF32 on tensor cores. The interpreter
    computes everything in fp32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def lower(x, like):
    """x in the dtype of `like`, for the next product; fp32 under the interpreter."""
    if INTERPRET:
        return x
    else:
        return x.to(like.dtype)


@triton.jit
def head_of(x, strides, b, h):
    """Address of row 0 of head h of batch row b, both int64, of x [b, s, h, d]."""
    return x + b * strides[0] + h * strides[2]


@triton.jit
def tile_at(base, row, stride):
    """Address of a row, a scalar: then the offsets within a tile are the same for every tile."""
    return base + row.to(tl.int64) * stride


@triton.jit
def load_tile(
    base,
    row,
    stride,
    num_rows,
    ROWS: tl.constexpr,
    FROM: tl.constexpr,
    COLS: tl.constexpr,
    D: tl.constexpr,
    MASK: tl.constexpr,
):
    """[ROWS, COLS] of rows row.. and columns FROM..; beyond num_rows (if MASK) and beyond D: zeros."""
    r = tl.arange(0, ROWS)
    c = FROM + tl.arange(0, COLS)
    p = tile_at(base, row, stride) + (r.to(tl.int64)[:, None] * stride + c[None, :])
    if MASK:
        if FROM + COLS > D:
            return tl.load(p, mask=(r < num_rows)[:, None] & (c < D)[None, :], other=0.0)
        else:
            return tl.load(p, mask=(r < num_rows)[:, None], other=0.0)
    else:
        if FROM + COLS > D:
            return tl.load(p, mask=(c < D)[None, :], other=0.0)
        else:
            return tl.load(p)


@triton.jit
def load_columns(
    base, row, stride, num_rows, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr,
    MASK: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """The two tiles of columns of rows row.."""
    x0 = load_tile(base, row, stride, num_rows, ROWS, 0, D0, D, MASK)
    x1 = x0
    if DUAL:
        x1 = load_tile(base + D, row, stride, num_rows, ROWS, 0, D1, D, MASK)
    elif D1 > 0:
        x1 = load_tile(base, row, stride, num_rows, ROWS, D0, D1, D, MASK)
    return x0, x1


@triton.jit
def zero_columns(ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Two tiles of zeros, fp32."""
    x0 = tl.zeros((ROWS, D0), tl.float32)
    x1 = x0
    if D1 > 0:
        x1 = tl.zeros((ROWS, D1), tl.float32)
    return x0, x1


@triton.jit
def store_columns(
    base, row, stride, num_rows, x0, x1, ADD: tl.constexpr, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    D: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """`store_tile` of both tiles of columns."""
    store_tile(base, row, stride, num_rows, x0, ADD, ROWS, 0, D0, D)
    if DUAL:
        store_tile(base + D, row, stride, num_rows, x1, ADD, ROWS, 0, D1, D)
    elif D1 > 0:
        store_tile(base, row, stride, num_rows, x1, ADD, ROWS, D0, D1, D)


@triton.jit
def products(x0, x1, y0, y1, D1: tl.constexpr, DUAL: tl.constexpr, PRECISION: tl.constexpr):
    """x y^T, fp32, and its tangent."""
    zero = tl.zeros((x0.shape[0], y0.shape[0]), tl.float32)
    s = dot(x0, tl.trans(y0), zero, PRECISION)
    st = s
    if DUAL:
        st = dot(x1, tl.trans(y0), dot(x0, tl.trans(y1), zero, PRECISION), PRECISION)
    elif D1 > 0:
        s = dot(x1, tl.trans(y1), s, PRECISION)
    return s, st


@triton.jit
def add_products(acc0, acc1, w, wt, x0, x1, D1: tl.constexpr, DUAL: tl.constexpr, PRECISION: tl.constexpr):
    """acc + w x, and its tangent, from weights w in the dtype of x and their tangent wt, fp32."""
    acc0 = dot(w, x0, acc0, PRECISION)
    if DUAL:
        acc1 = dot(lower(wt, x0), x0, dot(w, x1, acc1, PRECISION), PRECISION)
    elif D1 > 0:
        acc1 = dot(w, x1, acc1, PRECISION)
    return acc0, acc1


@triton.jit
def load_box(tensor, b, row, h, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] of one head by the copy engine (TMA): all columns of rows row.., zeros beyond the tensor."""
    return tensor.load([b, row, h, 0]).reshape(ROWS, COLS)


@triton.jit
def add_box(tensor, b, row, h, x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add x [ROWS, COLS] to rows row.. of one head by the copy engine, in any order with other programs."""
    tensor.atomic_add([b, row, h, 0], x.reshape(1, ROWS, 1, COLS))


@triton.jit
def store_tile(
    base,
    row,
    stride,
    num_rows,
    x,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    FROM: tl.constexpr,
    COLS: tl.constexpr,
    D: tl.constexpr,
):
    """Store (or add, if ADD) x [ROWS, COLS] at rows row.. and columns FROM.., within num_rows and D."""
    r = tl.arange(0, ROWS)
    c = FROM + tl.arange(0, COLS)
    p = tile_at(base, row, stride) + (r.to(tl.int64)[:, None] * stride + c[None, :])
    mask = (r < num_rows)[:, None] & (c < D)[None, :]
    if ADD:
        x += tl.load(p, mask=mask, other=0.0).to(tl.float32)
    tl.store(p, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def window_mask(q_pos, k_pos, in_range, left, right, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """`kernels.masks.window_mask` on broadcast positions, within `in_range`."""
    ok = in_range
    if CAUSAL:
        ok = ok & (k_pos <= q_pos)
    if WINDOW:
        ok = ok & (k_pos + left >= q_pos) & (k_pos <= q_pos + right)
    return ok


@triton.jit
def kept(q_pos, k_pos, dropout):
    """The pairs that dropout keeps, from broadcast int32 positions: bit for bit those of `dropout.keep_weights`.

    dropout: (seed's lower word, its upper word, threshold, head, sequence), int32 whose bits are unsigned numbers.
    """
    low, high, threshold, head, sequence = dropout
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    word, _, _, _ = tl.philox(seed, q_pos, k_pos, head, sequence, ROUNDS)
    return word >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def tile_of(table):
    """(first row, rows, first position) of an entry of a table of tiles; the range of its segments follows."""
    return tl.load(table), tl.load(table + 1), tl.load(table + 2)


@triton.jit
def segment_of(table):
    """(first row, length, first position, sequence) of an entry of a table of segments."""
    return tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)


@triton.jit
def whole_tiles(lo, full_lo, full_hi, hi, STEP: tl.constexpr):
    """Round a range, and the part of it that needs no mask, to multiples of STEP; bounds rise, none is negative."""
    hi = tl.maximum(hi, 0)
    lo = tl.minimum(lo, hi) // STEP * STEP
    full_lo = (full_lo + STEP - 1) // STEP * STEP
    full_hi = tl.maximum(full_hi, 0) // STEP * STEP
    full_lo = tl.maximum(tl.minimum(full_lo, hi), lo)  # hi may cut a tile: then nothing is left beyond it
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def key_range(first, last, k_pos, k_len, left, right, STEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Keys of a segment that queries at positions first..last see: (lo, full_lo, full_hi, hi).

    Tiles of STEP keys in [lo, full_lo) and [full_hi, hi) need a mask, those in [full_lo, full_hi) are seen by all.
    """
    lo = 0
    hi = k_len
    full_lo = 0
    full_hi = k_len
    if CAUSAL:
        hi = tl.minimum(hi, last - k_pos + 1)
        full_hi = tl.minimum(full_hi, first - k_pos + 1)
    if WINDOW:
        lo = tl.maximum(lo, first - left - k_pos)
        full_lo = tl.maximum(full_lo, last - left - k_pos)
        hi = tl.minimum(hi, last + right - k_pos + 1)
        full_hi = tl.minimum(full_hi, first + right - k_pos + 1)
    return whole_tiles(lo, full_lo, full_hi, hi, STEP)


@triton.jit
def query_range(first, last, q_pos, q_len, left, right, STEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Queries of a segment that see keys at positions first..last, cut as `key_range` does."""
    lo = 0
    hi = q_len
    full_lo = 0
    full_hi = q_len
    if CAUSAL:
        lo = tl.maximum(lo, first - q_pos)
        full_lo = tl.maximum(full_lo, last - q_pos)
    if WINDOW:
        lo = tl.maximum(lo, first - right - q_pos)
        full_lo = tl.maximum(full_lo, last - right - q_pos)
        hi = tl.minimum(hi, last + left - q_pos + 1)
        full_hi = tl.minimum(full_hi, first + left - q_pos + 1)
    return whole_tiles(lo, full_lo, full_hi, hi, STEP)


@triton.jit
def alibi(slope2, q_pos, k_pos):
    """What ALiBi takes off logits in base 2, from broadcast int32 positions; slope2 = slope * log2(e)."""
    return slope2 * tl.abs(q_pos - k_pos).to(tl.float32)


@triton.jit
def cap_logits(s, softcap):
    """softcap * tanh(s / softcap), written with exp2 so that no device library is needed."""
    e = tl.math.exp2(s * (2.0 * LOG2E / softcap))
    return softcap * (1.0 - 2.0 / (1.0 + e))


@triton.jit
def logits(s, st, scale, softcap, SOFTCAP: tl.constexpr, DUAL: tl.constexpr):
    """From raw products and their tangent: s and a factor, whose product is the logit in base 2; the logit's tangent,
    in base e; softcap's slope, and the slope's tangent."""
    factor, slope, slopet = scale * LOG2E, 1.0, 0.0
    if DUAL:
        st *= scale
    if SOFTCAP:
        s = cap_logits(s * scale, softcap)
        factor = LOG2E
        ratio = s / softcap
        slope = 1.0 - ratio * ratio
        if DUAL:
            st *= slope
            slopet = st * ratio * (-2.0 / softcap)
    return s, factor, st, slope, slopet


@triton.jit
def softmax_step(s, factor, m, l):
    """One tile of an online softmax over logits s * factor in base 2, -inf for hidden pairs, from the maximum m so far
    and the sum l of the weights exp2(logit - m): (weights, what shrinks sums so far, m, l)."""
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s * factor - base[:, None])
    shrink = tl.math.exp2(m - base)
    return p, shrink, m_new, l * shrink + tl.sum(p, 1)


@triton.jit
def softmax_end(m, l):
    """(lse, l), with -inf and 1 for rows that saw nothing."""
    empty = l == 0.0
    safe = tl.where(empty, 1.0, l)
    return tl.where(empty, float("-inf"), (m + tl.math.log2(safe)) * LN2), safe  # F(0): (2)


@triton.jit
def slope_of(SLOPES, stride, b, h):
    """ALiBi's slope of a head times log2(e); None without SLOPES."""
    slope2 = None
    if SLOPES is not None:
        slope2 = tl.load(SLOPES + b * stride + h) * LOG2E
    return slope2


@triton.jit
def dropout_of(seed_low, seed_high, threshold, first_head, b, h, sequence, DROPOUT: tl.constexpr):
    """What `kept` needs of a head and a segment; None without dropout."""
    dropout = None
    if DROPOUT:
        dropout = (seed_low, seed_high, threshold, first_head + h.to(tl.int32), b.to(tl.int32) + sequence)
    return dropout
