"""Attention forward with tangents: out, r and mu of a tile of queries in one pass over the keys they can see.

A dual tensor [b, s, h, 2 D] holds values in its first D columns and their tangents in the next D (duals.py). A tile of
each is COLS columns wide, the power of two that covers D. The numbers at the formulas are those of docs/design.md,
section 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    LN2,
    LOG2E,
    alibi,
    cap_logits,
    dot,
    head_of,
    kept,
    key_range,
    load_tile,
    lower,
    segment_of,
    store_tile,
    tile_at,
    tile_of,
    window_mask,
)


@triton.jit
def load_dual(
    base, row, stride, num_rows, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """[ROWS, COLS] of values and of tangents; zeros as in `load_tile`."""
    x = load_tile(base, row, stride, num_rows, ROWS, 0, COLS, D, MASK)
    return x, load_tile(base + D, row, stride, num_rows, ROWS, 0, COLS, D, MASK)


@triton.jit
def store_dual(
    base, row, stride, num_rows, x, xt, ADD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """`store_tile` of values and of tangents."""
    store_tile(base, row, stride, num_rows, x, ADD, ROWS, 0, COLS, D)
    store_tile(base + D, row, stride, num_rows, xt, ADD, ROWS, 0, COLS, D)


@triton.jit
def dual_scores(x, xt, y, yt):
    """x y^T and its tangent, fp32."""
    zero = tl.zeros((x.shape[0], y.shape[0]), tl.float32)
    y = tl.trans(y)
    return dot(x, y, zero), dot(xt, y, dot(x, tl.trans(yt), zero))


@triton.jit
def dual_dot(w, wt, x, xt, acc, acct):
    """acc + w x and acct + its tangent; w and wt, fp32, are multiplied in the dtype of x."""
    w, wt = lower(w, x), lower(wt, x)
    return dot(w, x, acc), dot(wt, x, dot(w, xt, acct))


@triton.jit
def dual_logits(s, st, q_pos, k_pos, scale, softcap, slope2, SOFTCAP: tl.constexpr):
    """From raw products and broadcast positions: the logit in base 2 and its tangent, in base e; softcap's slope and
    the slope's tangent."""
    st *= scale
    slope, slopet = 1.0, 0.0
    if SOFTCAP:
        capped = cap_logits(s * scale, softcap)
        ratio = capped / softcap
        slope = 1.0 - ratio * ratio
        st *= slope
        slopet = st * ratio * (-2.0 / softcap)
        s = capped * LOG2E
    else:
        s *= scale * LOG2E
    if slope2 is not None:
        s -= alibi(slope2, q_pos, k_pos)
    return s, st, slope, slopet


@triton.jit
def _jvp_range(
    out, r, m, l, mu, q, qt, K, V, k_row, sk, sv, lo, hi, k_len, k_pos, q_pos, left, right, scale, softcap, slope2,
    dropout,
    D: tl.constexpr, D_COLS: tl.constexpr, E: tl.constexpr, E_COLS: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys lo..hi of one segment; out, r, l and mu are sums with weights exp2(logit - m)."""
    cols = tl.arange(0, N)
    for n in tl.range(lo, hi, N, num_stages=STAGES):
        k, kt = load_dual(K, k_row + n, sk, k_len - n, N, D_COLS, D, MASK)
        s, st = dual_scores(q, qt, k, kt)
        k_at = (k_pos + n + cols)[None, :]
        s, st, _, _ = dual_logits(s, st, q_pos[:, None], k_at, scale, softcap, slope2, SOFTCAP)
        if MASK:
            ok = window_mask(q_pos[:, None], k_at, (cols < k_len - n)[None, :], left, right, CAUSAL, WINDOW)
            s = tl.where(ok, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - base[:, None])
        pst = p * st
        shrink = tl.math.exp2(m - base)
        l = l * shrink + tl.sum(p, 1)
        mu = mu * shrink + tl.sum(pst, 1)
        if dropout is not None:
            keep = kept(q_pos[:, None], k_at, dropout)
            p = tl.where(keep, p, 0.0)
            pst = tl.where(keep, pst, 0.0)
        v, vt = load_dual(V, k_row + n, sv, k_len - n, N, E_COLS, E, MASK)
        out, r = dual_dot(p, pst, v, vt, out * shrink[:, None], r * shrink[:, None])
        m = m_new
    return out, r, m, l, mu


@triton.jit(do_not_specialize=["seed_low", "seed_high", "threshold", "first_head"])
def attn_jvp_kernel(
    Q, K, V, OUT, LSE, SLOPES, q_tiles, k_segments,
    q_strides, k_strides, v_strides, out_strides, lse_strides, slopes_stride, left, right, scale, softcap,
    seed_low, seed_high, threshold, first_head, keep_weight,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tables and options as in `attn_fwd_kernel`; Q, K and V are dual, OUT has the columns out, r and mu."""
    D_COLS: tl.constexpr = 2 * D0 if D1 > 0 else D0
    E_COLS: tl.constexpr = 2 * E0 if E1 > 0 else E0
    tile = q_tiles + 5 * tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row, rows, first = tile_of(tile)
    i_row = tl.arange(0, M)
    q_pos = first + i_row
    q, qt = load_dual(head_of(Q, q_strides, b, h), row, q_strides[1], rows, M, D_COLS, D, True)
    out = tl.zeros((M, E_COLS), tl.float32)
    r = tl.zeros((M, E_COLS), tl.float32)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    mu = tl.zeros((M,), tl.float32)
    k_base = head_of(K, k_strides, b, h // GROUP)
    v_base = head_of(V, v_strides, b, h // GROUP)
    slope2 = None
    if SLOPES is not None:
        slope2 = tl.load(SLOPES + b * slopes_stride + h) * LOG2E
    for i in range(tl.load(tile + 3), tl.load(tile + 4)):
        k_row, k_len, k_pos, sequence = segment_of(k_segments + 4 * i)
        dropout = None
        if DROPOUT:
            dropout = (seed_low, seed_high, threshold, first_head + h.to(tl.int32), b.to(tl.int32) + sequence)
        bounds = key_range(first, first + rows - 1, k_pos, k_len, left, right, N, CAUSAL, WINDOW)
        for phase in tl.static_range(0 if WINDOW else 1, 3):
            out, r, m, l, mu = _jvp_range(
                out, r, m, l, mu, q, qt, k_base, v_base, k_row, k_strides[1], v_strides[1], bounds[phase],
                bounds[phase + 1], k_len, k_pos, q_pos, left, right, scale, softcap, slope2, dropout, D, D_COLS, E,
                E_COLS, N, phase != 1, CAUSAL, WINDOW, SOFTCAP, STAGES,
            )  # fmt: skip
    empty = l == 0.0
    safe = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(safe)) * LN2)  # F(0): (2)
    weight = 1.0 / safe
    mu *= weight  # (9)
    if DROPOUT:
        weight *= keep_weight
    base = head_of(OUT, out_strides, b, h)
    out, r = out * weight[:, None], r * weight[:, None]  # (3) and (10)
    store_dual(base, row, out_strides[1], rows, out, r, False, M, E_COLS, E)
    of_mu = tile_at(base + 2 * E, row, out_strides[1]) + i_row.to(tl.int64) * out_strides[1]
    tl.store(of_mu, mu, mask=i_row < rows)
    tl.store(LSE + b * lse_strides[0] + h * lse_strides[1] + row + i_row, lse, mask=i_row < rows)
