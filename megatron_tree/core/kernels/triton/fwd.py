"""Attention forward: one program per (tile of queries, head, batch row), looping over the KV segments it can see.

With tangents (DUAL) the same pass also gives r and mu. The numbers at the formulas are those of docs/design.md,
section 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    add_products,
    alibi,
    dropout_of,
    head_of,
    kept,
    key_range,
    load_box,
    load_columns,
    logits,
    lower,
    products,
    segment_of,
    slope_of,
    softmax_end,
    softmax_step,
    store_columns,
    tile_at,
    tile_of,
    window_mask,
    zero_columns,
)


@triton.jit
def _fwd_range(
    acc0, acc1, m, l, mu, q0, q1, K, V, K_BOXES, V_BOXES, b, h_kv, k_row, sk, sv, lo, hi, k_len, k_pos, q_pos, left,
    right, scale, softcap, slope2, dropout,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    N: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DUAL: tl.constexpr, STAGES: tl.constexpr, SPECIALIZED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys lo..hi of one segment: acc0, acc1, l and mu are sums with weights exp2(logit - m); l and
    mu include dropped pairs. m is in base 2."""
    cols = tl.arange(0, N)
    for n in tl.range(lo, hi, N, num_stages=STAGES, warp_specialize=SPECIALIZED and not MASK):
        if K_BOXES is not None:
            k0 = load_box(K_BOXES, b, k_row + n, h_kv, N, D0)
            k1 = k0
        else:
            k0, k1 = load_columns(K, k_row + n, sk, k_len - n, N, D0, D1, D, MASK, DUAL)
        s, st = products(q0, q1, k0, k1, D1, DUAL, PRECISION)
        s, factor, st, _, _ = logits(s, st, scale, softcap, SOFTCAP, DUAL)
        k_at = (k_pos + n + cols)[None, :]
        if slope2 is not None:
            s = s * factor - alibi(slope2, q_pos[:, None], k_at)
            factor = 1.0
        if MASK:
            ok = window_mask(q_pos[:, None], k_at, (cols < k_len - n)[None, :], left, right, CAUSAL, WINDOW)
            s = tl.where(ok, s, float("-inf"))
        p, shrink, m, l = softmax_step(s, factor, m, l)
        pst = p
        if DUAL:
            pst = p * st
            mu = mu * shrink + tl.sum(pst, 1)
        if dropout is not None:
            keep = kept(q_pos[:, None], k_at, dropout)
            p, pst = tl.where(keep, p, 0.0), tl.where(keep, pst, 0.0)
        if V_BOXES is not None:
            v0 = load_box(V_BOXES, b, k_row + n, h_kv, N, E0)
            if MASK:  # rows after the segment may hold anything
                v0 = tl.where((cols < k_len - n)[:, None], v0, 0.0)
            v1 = v0
        else:
            v0, v1 = load_columns(V, k_row + n, sv, k_len - n, N, E0, E1, E, MASK, DUAL)
        p = lower(p, v0)
        acc0 = acc0 * shrink[:, None]
        if E1 > 0:
            acc1 = acc1 * shrink[:, None]
        acc0, acc1 = add_products(acc0, acc1, p, pst, v0, v1, E1, DUAL, PRECISION)
    return acc0, acc1, m, l, mu


@triton.jit(do_not_specialize=["seed_low", "seed_high", "threshold", "first_head"])
def attn_fwd_kernel(
    Q, K, V, K_BOXES, V_BOXES, OUT, LSE, SLOPES, q_tiles, k_segments,
    q_strides, k_strides, v_strides, out_strides, lse_strides, slopes_stride, left, right, scale, softcap,
    seed_low, seed_high, threshold, first_head, keep_weight,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, DUAL: tl.constexpr, STAGES: tl.constexpr, SPECIALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q_tiles int32 [tiles, 5]: first row, rows, first position, first and last + 1 of its KV segments;
    k_segments int32 [n, 4]: row, length, position, sequence. SLOPES fp32 [b, h], ALiBi's, or None.
    K_BOXES, V_BOXES: descriptors of k and v for `load_box`, with boxes of N rows and all columns of a head; or None.
    DUAL: Q, K and V are dual, and OUT has the columns out, r and mu.
    """
    tile = q_tiles + 5 * tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row, rows, first = tile_of(tile)
    r = tl.arange(0, M)
    q_pos = first + r
    q0, q1 = load_columns(head_of(Q, q_strides, b, h), row, q_strides[1], rows, M, D0, D1, D, True, DUAL)
    acc0, acc1 = zero_columns(M, E0, E1)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    mu = l
    k_base = head_of(K, k_strides, b, h // GROUP)
    v_base = head_of(V, v_strides, b, h // GROUP)
    slope2 = slope_of(SLOPES, slopes_stride, b, h)
    for i in range(tl.load(tile + 3), tl.load(tile + 4)):
        k_row, k_len, k_pos, sequence = segment_of(k_segments + 4 * i)
        dropout = dropout_of(seed_low, seed_high, threshold, first_head, b, h, sequence, DROPOUT)
        bounds = key_range(first, first + rows - 1, k_pos, k_len, left, right, N, CAUSAL, WINDOW)
        for phase in tl.static_range(0 if WINDOW else 1, 3):
            acc0, acc1, m, l, mu = _fwd_range(
                acc0, acc1, m, l, mu, q0, q1, k_base, v_base, K_BOXES, V_BOXES, b.to(tl.int32),
                (h // GROUP).to(tl.int32), k_row, k_strides[1], v_strides[1], bounds[phase], bounds[phase + 1], k_len,
                k_pos, q_pos, left, right, scale, softcap, slope2, dropout, D, D0, D1, E, E0, E1, N, phase != 1, CAUSAL,
                WINDOW, SOFTCAP, DUAL, STAGES, SPECIALIZED, PRECISION,
            )  # fmt: skip
    lse, l = softmax_end(m, l)
    weight = 1.0 / l
    if DUAL:
        of_mu = tile_at(head_of(OUT, out_strides, b, h) + 2 * E, row, out_strides[1])
        tl.store(of_mu + r.to(tl.int64) * out_strides[1], mu * weight, mask=r < rows)  # (9)
    if DROPOUT:
        weight *= keep_weight
    out0, out1 = acc0 * weight[:, None], acc1 * weight[:, None]  # dF/dzeta: (3), and (10)
    out_base = head_of(OUT, out_strides, b, h)
    store_columns(out_base, row, out_strides[1], rows, out0, out1, False, M, E0, E1, E, DUAL)
    tl.store(LSE + b * lse_strides[0] + h * lse_strides[1] + row + r, lse, mask=r < rows)
