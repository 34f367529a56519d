"""Attention backward: dq by tiles of queries; dk and dv by tiles of keys, over all heads of a KV head.

This is deterministic. With `Tiles.fused` the kernel of dk and dv adds up dq as well, in any order: 5 products, not 7.
Both recompute p = exp2(s - lse2) from the global lse, in base 2, with +inf where a query sees nothing, so that p is 0.
Under dropout a pair's value is keep_weight * v or 0: dp = dout.v and dv's weight p take that factor, p in ds does not.
Results are added to the given fp32 buffers: partial gradients of several cells add up. The numbers at the formulas are
those of docs/design.md, section 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    LOG2E,
    add_box,
    alibi,
    cap_logits,
    dot,
    head_of,
    kept,
    key_range,
    load_columns,
    load_tile,
    lower,
    query_range,
    segment_of,
    store_columns,
    tile_of,
    window_mask,
    zero_columns,
)


@triton.jit
def delta_kernel(
    DOUT, OUT, DLSE, DELTA, num_rows, dout_strides, out_strides, delta_strides,
    E: tl.constexpr, COLS: tl.constexpr, M: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """DELTA [b, h, s] = rowsum(dout * out) - dlse, which lies as DELTA does."""
    row = tl.program_id(0) * M
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    rows = num_rows - row
    dout = load_tile(head_of(DOUT, dout_strides, b, h), row, dout_strides[1], rows, M, 0, COLS, E, True).to(tl.float32)
    out = load_tile(head_of(OUT, out_strides, b, h), row, out_strides[1], rows, M, 0, COLS, E, True).to(tl.float32)
    delta = tl.sum(dout * out, 1)
    r = tl.arange(0, M)
    at = b * delta_strides[0] + h * delta_strides[1] + row + r
    if HAS_DLSE:
        delta -= tl.load(DLSE + at, mask=r < rows, other=0.0)
    tl.store(DELTA + at, delta, mask=r < rows)


@triton.jit
def _probabilities(s, lse2, q_pos, k_pos, scale, softcap, slope2, SOFTCAP: tl.constexpr):
    """(p, ds/dlogit) from raw products; lse2 and the positions broadcast."""
    if slope2 is not None:
        lse2 = lse2 + alibi(slope2, q_pos, k_pos)
    slope = 1.0
    if SOFTCAP:
        capped = cap_logits(s * scale, softcap)
        slope = 1.0 - (capped / softcap) * (capped / softcap)
        p = tl.math.exp2(capped * LOG2E - lse2)
    else:
        p = tl.math.exp2(s * (scale * LOG2E) - lse2)
    return p, slope


@triton.jit
def _dq_range(
    dq0, dq1, q0, q1, do0, do1, lse2, delta, K, V, k_row, sk, sv, lo, hi, k_len, k_pos, q_pos, left, right, scale,
    softcap, slope2, keep_weight, dropout,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    N: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, N)
    for n in tl.range(lo, hi, N, num_stages=STAGES):
        k0 = load_tile(K, k_row + n, sk, k_len - n, N, 0, D0, D, MASK)
        v0 = load_tile(V, k_row + n, sv, k_len - n, N, 0, E0, E, MASK)
        zero = tl.zeros((q0.shape[0], N), tl.float32)
        s = dot(q0, tl.trans(k0), zero)
        dp = dot(do0, tl.trans(v0), zero)
        k1 = k0
        if D1 > 0:
            k1 = load_tile(K, k_row + n, sk, k_len - n, N, D0, D1, D, MASK)
            s = dot(q1, tl.trans(k1), s)
        if E1 > 0:
            dp = dot(do1, tl.trans(load_tile(V, k_row + n, sv, k_len - n, N, E0, E1, E, MASK)), dp)
        k_at = (k_pos + n + cols)[None, :]
        p, slope = _probabilities(s, lse2[:, None], q_pos[:, None], k_at, scale, softcap, slope2, SOFTCAP)
        if MASK:
            ok = window_mask(q_pos[:, None], k_at, (cols < k_len - n)[None, :], left, right, CAUSAL, WINDOW)
            p = tl.where(ok, p, 0.0)
        if dropout is not None:
            dp = tl.where(kept(q_pos[:, None], k_at, dropout), dp * keep_weight, 0.0)
        ds = lower(p * (dp - delta[:, None]) * slope, k0)  # d2F/ds dzeta: (6)
        dq0 = dot(ds, k0, dq0)  # d2F/dq dzeta: (7)
        if D1 > 0:
            dq1 = dot(ds, k1, dq1)
    return dq0, dq1


@triton.jit(do_not_specialize=["seed_low", "seed_high", "threshold", "first_head"])
def attn_bwd_dq_kernel(
    Q, K, V, DOUT, LSE2, DELTA, SLOPES, DQ, q_tiles, k_segments,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, lse_strides, slopes_stride, left, right, scale,
    softcap, seed_low, seed_high, threshold, first_head, keep_weight,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DQ += this block's dq; tables as in `attn_fwd_kernel`."""
    tile = q_tiles + 5 * tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row, rows, first = tile_of(tile)
    r = tl.arange(0, M)
    q_pos = first + r
    q0, q1 = load_columns(head_of(Q, q_strides, b, h), row, q_strides[1], rows, M, D0, D1, D, True)
    do0, do1 = load_columns(head_of(DOUT, dout_strides, b, h), row, dout_strides[1], rows, M, E0, E1, E, True)
    dq0, dq1 = zero_columns(M, D0, D1)
    at = b * lse_strides[0] + h * lse_strides[1] + row + r
    lse2 = tl.load(LSE2 + at, mask=r < rows, other=float("inf"))
    delta = tl.load(DELTA + at, mask=r < rows, other=0.0)
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
            dq0, dq1 = _dq_range(
                dq0, dq1, q0, q1, do0, do1, lse2, delta, k_base, v_base, k_row, k_strides[1], v_strides[1],
                bounds[phase], bounds[phase + 1], k_len, k_pos, q_pos, left, right, scale, softcap, slope2, keep_weight,
                dropout, D, D0, D1, E, E0, E1, N, phase != 1, CAUSAL, WINDOW, SOFTCAP, STAGES,
            )  # fmt: skip
    dq_base = head_of(DQ, dq_strides, b, h)
    store_columns(dq_base, row, dq_strides[1], rows, dq0 * scale, dq1 * scale, True, M, D0, D1, D)


@triton.jit
def _dkdv_range(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, Q, DOUT, LSE2, DELTA, DQ_BOXES, b, h, q_row, sq, sd, lo, hi, q_len, q_pos,
    k_pos, in_k, left, right, scale, softcap, slope2, keep_weight, dropout,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    M: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Transposed products [keys, queries]: the tile of keys is fixed, the loop runs over queries."""
    cols = tl.arange(0, M)
    for n in tl.range(lo, hi, M, num_stages=STAGES):
        rows = q_len - n
        q0 = load_tile(Q, q_row + n, sq, rows, M, 0, D0, D, MASK)
        do0 = load_tile(DOUT, q_row + n, sd, rows, M, 0, E0, E, MASK)
        zero = tl.zeros((k0.shape[0], M), tl.float32)
        s = dot(k0, tl.trans(q0), zero)
        dp = dot(v0, tl.trans(do0), zero)
        q1 = q0
        if D1 > 0:
            q1 = load_tile(Q, q_row + n, sq, rows, M, D0, D1, D, MASK)
            s = dot(k1, tl.trans(q1), s)
        do1 = do0
        if E1 > 0:
            do1 = load_tile(DOUT, q_row + n, sd, rows, M, E0, E1, E, MASK)
            dp = dot(v1, tl.trans(do1), dp)
        if MASK:
            lse2 = tl.load(LSE2 + q_row + n + cols, mask=cols < rows, other=float("inf"))
            delta = tl.load(DELTA + q_row + n + cols, mask=cols < rows, other=0.0)
        else:
            lse2 = tl.load(LSE2 + q_row + n + cols)
            delta = tl.load(DELTA + q_row + n + cols)
        q_at = (q_pos + n + cols)[None, :]
        p, slope = _probabilities(s, lse2[None, :], q_at, k_pos[:, None], scale, softcap, slope2, SOFTCAP)
        if MASK:
            ok = window_mask(q_at, k_pos[:, None], in_k[:, None], left, right, CAUSAL, WINDOW)
            p = tl.where(ok, p, 0.0)
        dropped = p
        if dropout is not None:
            keep = kept(q_at, k_pos[:, None], dropout)
            dropped = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * keep_weight, 0.0)
        ds = lower(p * (dp - delta[None, :]) * slope, q0)  # d2F/ds dzeta: (6)
        p = lower(dropped, do0)
        dv0 = dot(p, do0, dv0)  # d2F/dv dzeta: (5)
        dk0 = dot(ds, q0, dk0)  # d2F/dk dzeta: (7)
        if E1 > 0:
            dv1 = dot(p, do1, dv1)
        if D1 > 0:
            dk1 = dot(ds, q1, dk1)
        if DQ_BOXES is not None:  # rows after the segment get zeros
            dq = dot(tl.trans(ds), k0, tl.zeros((M, D0), tl.float32))
            add_box(DQ_BOXES, b, q_row + n, h, dq * scale, M, D0)
    return dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=["seed_low", "seed_high", "threshold", "first_head", "parts"])
def attn_bwd_dkdv_kernel(
    Q, K, V, DOUT, LSE2, DELTA, SLOPES, DQ_BOXES, DK, DV, k_tiles, q_segments,
    q_strides, k_strides, v_strides, dout_strides, dk_part_stride, dk_strides, dv_part_stride, dv_strides, lse_strides,
    slopes_stride, left, right, scale, softcap, seed_low, seed_high, threshold, first_head, keep_weight, parts,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DK, DV [parts] += this block's, a part from each slice of the query heads of a KV head; k_tiles and q_segments
    as q_tiles and k_segments in `attn_fwd_kernel`. DQ_BOXES: a descriptor of dq with boxes of M rows, to which this
    block's dq is added; or None.
    """
    tile = k_tiles + 5 * tl.program_id(0)
    h_kv = (tl.program_id(1) // parts).to(tl.int64)
    part = (tl.program_id(1) % parts).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row, rows, first = tile_of(tile)
    r = tl.arange(0, N)
    k_pos = first + r
    in_k = r < rows
    k0, k1 = load_columns(head_of(K, k_strides, b, h_kv), row, k_strides[1], rows, N, D0, D1, D, True)
    v0, v1 = load_columns(head_of(V, v_strides, b, h_kv), row, v_strides[1], rows, N, E0, E1, E, True)
    dk0, dk1 = zero_columns(N, D0, D1)
    dv0, dv1 = zero_columns(N, E0, E1)
    from_segment = tl.load(tile + 3)
    num_segments = tl.load(tile + 4) - from_segment
    heads = GROUP // parts
    for i in range(heads * num_segments):
        h = h_kv * GROUP + part * heads + i // num_segments
        q_row, q_len, q_pos, sequence = segment_of(q_segments + 4 * (from_segment + i % num_segments))
        dropout = None
        if DROPOUT:
            dropout = (seed_low, seed_high, threshold, first_head + h.to(tl.int32), b.to(tl.int32) + sequence)
        q_base = head_of(Q, q_strides, b, h)
        d_base = head_of(DOUT, dout_strides, b, h)
        l_at = b * lse_strides[0] + h * lse_strides[1]
        slope2 = None
        if SLOPES is not None:
            slope2 = tl.load(SLOPES + b * slopes_stride + h) * LOG2E
        bounds = query_range(first, first + rows - 1, q_pos, q_len, left, right, M, CAUSAL, WINDOW)
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3):
            dk0, dk1, dv0, dv1 = _dkdv_range(
                dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_base, d_base, LSE2 + l_at, DELTA + l_at, DQ_BOXES,
                b.to(tl.int32), h.to(tl.int32), q_row, q_strides[1], dout_strides[1], bounds[phase], bounds[phase + 1],
                q_len, q_pos, k_pos, in_k, left, right, scale, softcap, slope2, keep_weight, dropout, D, D0, D1, E, E0,
                E1, M, phase != 1, CAUSAL, WINDOW, SOFTCAP, STAGES,
            )  # fmt: skip
    if DROPOUT:
        dv0 *= keep_weight
        dv1 *= keep_weight
    dk_base = head_of(DK + part * dk_part_stride, dk_strides, b, h_kv)
    dv_base = head_of(DV + part * dv_part_stride, dv_strides, b, h_kv)
    store_columns(dk_base, row, dk_strides[1], rows, dk0 * scale, dk1 * scale, True, N, D0, D1, D)
    store_columns(dv_base, row, dv_strides[1], rows, dv0, dv1, True, N, E0, E1, E)
