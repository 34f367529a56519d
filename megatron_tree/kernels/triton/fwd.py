"""Attention forward: one program per (tile of queries, head, batch row), looping over the KV segments it can see.

The numbers at the formulas are those of docs/design.md, section 1.
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
    load_box,
    load_columns,
    load_tile,
    lower,
    segment_of,
    store_columns,
    tile_of,
    window_mask,
    zero_columns,
)


@triton.jit
def _fwd_range(
    acc0, acc1, m, l, q0, q1, K, V, K_BOXES, V_BOXES, b, h_kv, k_row, sk, sv, lo, hi, k_len, k_pos, q_pos, left, right,
    scale, softcap, slope2, dropout,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    N: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys lo..hi of one segment; m and the logits are in base 2; l includes dropped pairs."""
    cols = tl.arange(0, N)
    for n in tl.range(lo, hi, N, num_stages=STAGES, warp_specialize=SPECIALIZED and not MASK):
        if K_BOXES is not None:
            k0 = load_box(K_BOXES, b, k_row + n, h_kv, N, D0)
        else:
            k0 = load_tile(K, k_row + n, sk, k_len - n, N, 0, D0, D, MASK)
        s = dot(q0, tl.trans(k0), tl.zeros((q0.shape[0], N), tl.float32))
        if D1 > 0:
            s = dot(q1, tl.trans(load_tile(K, k_row + n, sk, k_len - n, N, D0, D1, D, MASK)), s)
        factor = scale * LOG2E
        if SOFTCAP:
            s = cap_logits(s * scale, softcap)
            factor = LOG2E
        if slope2 is not None:
            s = s * factor - alibi(slope2, q_pos[:, None], (k_pos + n + cols)[None, :])
            factor = 1.0
        if MASK:
            ok = window_mask(
                q_pos[:, None], (k_pos + n + cols)[None, :], (cols < k_len - n)[None, :], left, right, CAUSAL, WINDOW
            )
            s = tl.where(ok, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s * factor - base[:, None])
        shrink = tl.math.exp2(m - base)
        l = l * shrink + tl.sum(p, 1)
        if dropout is not None:
            p = tl.where(kept(q_pos[:, None], (k_pos + n + cols)[None, :], dropout), p, 0.0)
        if V_BOXES is not None:
            v0 = load_box(V_BOXES, b, k_row + n, h_kv, N, E0)
            if MASK:  # rows after the segment may hold anything
                v0 = tl.where((cols < k_len - n)[:, None], v0, 0.0)
        else:
            v0 = load_tile(V, k_row + n, sv, k_len - n, N, 0, E0, E, MASK)
        p = lower(p, v0)
        acc0 = dot(p, v0, acc0 * shrink[:, None])
        if E1 > 0:
            v1 = load_tile(V, k_row + n, sv, k_len - n, N, E0, E1, E, MASK)
            acc1 = dot(p, v1, acc1 * shrink[:, None])
        m = m_new
    return acc0, acc1, m, l


@triton.jit(do_not_specialize=["seed_low", "seed_high", "threshold", "first_head"])
def attn_fwd_kernel(
    Q, K, V, K_BOXES, V_BOXES, OUT, LSE, SLOPES, q_tiles, k_segments,
    q_strides, k_strides, v_strides, out_strides, lse_strides, slopes_stride, left, right, scale, softcap,
    seed_low, seed_high, threshold, first_head, keep_weight,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """q_tiles int32 [tiles, 5]: first row, rows, first position, first and last + 1 of its KV segments;
    k_segments int32 [n, 4]: row, length, position, sequence. SLOPES fp32 [b, h], ALiBi's, or None.
    K_BOXES, V_BOXES: descriptors of k and v for `load_box`, with boxes of N rows and all columns of a head; or None.
    """
    tile = q_tiles + 5 * tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row, rows, first = tile_of(tile)
    r = tl.arange(0, M)
    q_pos = first + r
    q0, q1 = load_columns(head_of(Q, q_strides, b, h), row, q_strides[1], rows, M, D0, D1, D, True)
    acc0, acc1 = zero_columns(M, E0, E1)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
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
            acc0, acc1, m, l = _fwd_range(
                acc0, acc1, m, l, q0, q1, k_base, v_base, K_BOXES, V_BOXES, b.to(tl.int32), (h // GROUP).to(tl.int32),
                k_row, k_strides[1], v_strides[1], bounds[phase], bounds[phase + 1], k_len, k_pos, q_pos, left, right,
                scale, softcap, slope2, dropout, D, D0, D1, E, E0, E1, N, phase != 1, CAUSAL, WINDOW, SOFTCAP, STAGES,
                SPECIALIZED,
            )  # fmt: skip
    empty = l == 0.0
    safe = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(safe)) * LN2)  # F(0): (2)
    weight = 1.0 / safe
    if DROPOUT:
        weight *= keep_weight
    out0, out1 = acc0 * weight[:, None], acc1 * weight[:, None]  # dF/dzeta: (3)
    store_columns(head_of(OUT, out_strides, b, h), row, out_strides[1], rows, out0, out1, False, M, E0, E1, E)
    tl.store(LSE + b * lse_strides[0] + h * lse_strides[1] + row + r, lse, mask=r < rows)
