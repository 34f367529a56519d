"""Attention backward: dq by tiles of queries; dk and dv by tiles of keys, over all heads of a KV head.

This is deterministic. With `Tiles.fused` the kernel of dk and dv adds up dq as well, in any order: 5 products, not 7.
Both recompute p = exp2(s - lse2) from the global lse, in base 2, with +inf where a query sees nothing, so that p is 0.
Under dropout a pair's value is keep_weight * v or 0: dp = dout.v and dv's weight p take that factor, p in ds does not.
Results are added to the given fp32 buffers: partial gradients of several cells add up. With tangents (DUAL) the same
kernels are second order: they also give the tangents of dq, dk and dv, from the global mu and kappa besides. The
numbers at the formulas are those of docs/design.md, section 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    add_box,
    add_products,
    alibi,
    dot,
    dropout_of,
    head_of,
    kept,
    key_range,
    load_columns,
    load_tile,
    logits,
    lower,
    products,
    query_range,
    segment_of,
    slope_of,
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
def _load_statistics(
    LSE2, DELTA, strides, row, n, num_rows, ROWS: tl.constexpr, MASK: tl.constexpr, DUAL: tl.constexpr
):  # fmt: skip
    """lse2, delta, mu and kappa of a head's queries from row + n on; beyond num_rows (if MASK) weights are 0."""
    r = tl.arange(0, ROWS)
    LSE2 = LSE2 + row + n + r
    DELTA = DELTA + row + n + r
    lse2 = _load_rows(LSE2, r < num_rows, float("inf"), MASK)
    delta = _load_rows(DELTA, r < num_rows, 0.0, MASK)
    mu, kappa = lse2, delta
    if DUAL:
        mu = _load_rows(LSE2 + strides[2], r < num_rows, 0.0, MASK)
        kappa = _load_rows(DELTA + strides[2], r < num_rows, 0.0, MASK)
    return lse2, delta, mu, kappa


@triton.jit
def _load_rows(at, in_range, other, MASK: tl.constexpr):
    if MASK:
        return tl.load(at, mask=in_range, other=other)
    else:
        return tl.load(at)


@triton.jit
def _weights(
    s, st, dp, dpt, lse2, delta, mu, kappa, q_pos, k_pos, in_range, left, right, scale, softcap, slope2, keep_weight,
    dropout,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """(p, its tangent, ds, its tangent) from the products q.k and dout.v and their tangents; ds without softmax_scale,
    p without keep_weight. Statistics, positions and `in_range` broadcast."""
    if slope2 is not None:
        lse2 = lse2 + alibi(slope2, q_pos, k_pos)
    s, factor, st, slope, slopet = logits(s, st, scale, softcap, SOFTCAP, DUAL)
    p = tl.math.exp2(s * factor - lse2)
    if MASK:
        p = tl.where(window_mask(q_pos, k_pos, in_range, left, right, CAUSAL, WINDOW), p, 0.0)
    pt = p
    if DUAL:
        pt = p * (st - mu)
    dropped, droppedt = p, pt
    if dropout is not None:
        keep = kept(q_pos, k_pos, dropout)
        dropped, droppedt = tl.where(keep, p, 0.0), tl.where(keep, pt, 0.0)
        dp, dpt = tl.where(keep, dp * keep_weight, 0.0), tl.where(keep, dpt * keep_weight, 0.0)
    dp -= delta
    ds = p * dp  # d2F/ds dzeta: (6)
    dst = ds
    if DUAL:
        dst = pt * dp + p * (dpt - kappa)  # (13)
        if SOFTCAP:
            dst = dst * slope + ds * slopet
    return dropped, droppedt, ds * slope, dst


@triton.jit
def _dq_range(
    dq0, dq1, q0, q1, do0, do1, statistics, K, V, k_row, sk, sv, lo, hi, k_len, k_pos, q_pos, left, right, scale,
    softcap, slope2, keep_weight, dropout,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    N: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DUAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, N)
    lse2, delta, mu, kappa = statistics
    for n in tl.range(lo, hi, N, num_stages=STAGES):
        k0, k1 = load_columns(K, k_row + n, sk, k_len - n, N, D0, D1, D, MASK, DUAL)
        v0, v1 = load_columns(V, k_row + n, sv, k_len - n, N, E0, E1, E, MASK, DUAL)
        s, st = products(q0, q1, k0, k1, D1, DUAL, PRECISION)
        dp, dpt = products(do0, do1, v0, v1, E1, DUAL, PRECISION)
        _, _, ds, dst = _weights(
            s, st, dp, dpt, lse2[:, None], delta[:, None], mu[:, None], kappa[:, None], q_pos[:, None],
            (k_pos + n + cols)[None, :], (cols < k_len - n)[None, :], left, right, scale, softcap, slope2, keep_weight,
            dropout, MASK, CAUSAL, WINDOW, SOFTCAP, DUAL,
        )  # fmt: skip
        dq0, dq1 = add_products(dq0, dq1, lower(ds, k0), dst, k0, k1, D1, DUAL, PRECISION)  # d2F/dq dzeta: (7), (14)
    return dq0, dq1


@triton.jit(do_not_specialize=["seed_low", "seed_high", "threshold", "first_head"])
def attn_bwd_dq_kernel(
    Q, K, V, DOUT, LSE2, DELTA, SLOPES, DQ, q_tiles, k_segments,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, lse_strides, slopes_stride, left, right, scale,
    softcap, seed_low, seed_high, threshold, first_head, keep_weight,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, DUAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DQ += this block's dq; tables as in `attn_fwd_kernel`. LSE2 and DELTA [b, h, s]; if DUAL [b, h, 2, s], with
    mu and kappa besides."""
    tile = q_tiles + 5 * tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row, rows, first = tile_of(tile)
    q_pos = first + tl.arange(0, M)
    q0, q1 = load_columns(head_of(Q, q_strides, b, h), row, q_strides[1], rows, M, D0, D1, D, True, DUAL)
    do0, do1 = load_columns(head_of(DOUT, dout_strides, b, h), row, dout_strides[1], rows, M, E0, E1, E, True, DUAL)
    dq0, dq1 = zero_columns(M, D0, D1)
    of_head = b * lse_strides[0] + h * lse_strides[1]
    statistics = _load_statistics(LSE2 + of_head, DELTA + of_head, lse_strides, row, 0, rows, M, True, DUAL)
    k_base = head_of(K, k_strides, b, h // GROUP)
    v_base = head_of(V, v_strides, b, h // GROUP)
    slope2 = slope_of(SLOPES, slopes_stride, b, h)
    for i in range(tl.load(tile + 3), tl.load(tile + 4)):
        k_row, k_len, k_pos, sequence = segment_of(k_segments + 4 * i)
        dropout = dropout_of(seed_low, seed_high, threshold, first_head, b, h, sequence, DROPOUT)
        bounds = key_range(first, first + rows - 1, k_pos, k_len, left, right, N, CAUSAL, WINDOW)
        for phase in tl.static_range(0 if WINDOW else 1, 3):
            dq0, dq1 = _dq_range(
                dq0, dq1, q0, q1, do0, do1, statistics, k_base, v_base, k_row, k_strides[1], v_strides[1],
                bounds[phase], bounds[phase + 1], k_len, k_pos, q_pos, left, right, scale, softcap, slope2, keep_weight,
                dropout, D, D0, D1, E, E0, E1, N, phase != 1, CAUSAL, WINDOW, SOFTCAP, DUAL, STAGES, PRECISION,
            )  # fmt: skip
    dq_base = head_of(DQ, dq_strides, b, h)
    store_columns(dq_base, row, dq_strides[1], rows, dq0 * scale, dq1 * scale, True, M, D0, D1, D, DUAL)


@triton.jit
def _dkdv_range(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, Q, DOUT, LSE2, DELTA, lse_strides, DQ_BOXES, b, h, q_row, sq, sd, lo, hi,
    q_len, q_pos, k_pos, in_k, left, right, scale, softcap, slope2, keep_weight, dropout,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    M: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DUAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Transposed products [keys, queries]: the tile of keys is fixed, the loop runs over queries."""
    cols = tl.arange(0, M)
    for n in tl.range(lo, hi, M, num_stages=STAGES):
        rows = q_len - n
        q0, q1 = load_columns(Q, q_row + n, sq, rows, M, D0, D1, D, MASK, DUAL)
        do0, do1 = load_columns(DOUT, q_row + n, sd, rows, M, E0, E1, E, MASK, DUAL)
        s, st = products(k0, k1, q0, q1, D1, DUAL, PRECISION)
        dp, dpt = products(v0, v1, do0, do1, E1, DUAL, PRECISION)
        lse2, delta, mu, kappa = _load_statistics(LSE2, DELTA, lse_strides, q_row, n, rows, M, MASK, DUAL)
        p, pt, ds, dst = _weights(
            s, st, dp, dpt, lse2[None, :], delta[None, :], mu[None, :], kappa[None, :], (q_pos + n + cols)[None, :],
            k_pos[:, None], in_k[:, None], left, right, scale, softcap, slope2, keep_weight, dropout, MASK, CAUSAL,
            WINDOW, SOFTCAP, DUAL,
        )  # fmt: skip
        ds, p = lower(ds, q0), lower(p, do0)
        dv0, dv1 = add_products(dv0, dv1, p, pt, do0, do1, E1, DUAL, PRECISION)  # d2F/dv dzeta: (5), and (12)
        dk0, dk1 = add_products(dk0, dk1, ds, dst, q0, q1, D1, DUAL, PRECISION)  # d2F/dk dzeta: (7), and (14)
        if DQ_BOXES is not None:  # rows after the segment get zeros
            dq = dot(tl.trans(ds), k0, tl.zeros((M, D0), tl.float32), PRECISION)
            add_box(DQ_BOXES, b, q_row + n, h, dq * scale, M, D0)
    return dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=["seed_low", "seed_high", "threshold", "first_head", "parts"])
def attn_bwd_dkdv_kernel(
    Q, K, V, DOUT, LSE2, DELTA, SLOPES, DQ_BOXES, DK, DV, k_tiles, q_segments,
    q_strides, k_strides, v_strides, dout_strides, dk_part_stride, dk_strides, dv_part_stride, dv_strides, lse_strides,
    slopes_stride, left, right, scale, softcap, seed_low, seed_high, threshold, first_head, keep_weight, parts,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, DUAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
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
    k0, k1 = load_columns(head_of(K, k_strides, b, h_kv), row, k_strides[1], rows, N, D0, D1, D, True, DUAL)
    v0, v1 = load_columns(head_of(V, v_strides, b, h_kv), row, v_strides[1], rows, N, E0, E1, E, True, DUAL)
    dk0, dk1 = zero_columns(N, D0, D1)
    dv0, dv1 = zero_columns(N, E0, E1)
    from_segment = tl.load(tile + 3)
    num_segments = tl.load(tile + 4) - from_segment
    heads = GROUP // parts
    for i in range(heads * num_segments):
        h = h_kv * GROUP + part * heads + i // num_segments
        q_row, q_len, q_pos, sequence = segment_of(q_segments + 4 * (from_segment + i % num_segments))
        dropout = dropout_of(seed_low, seed_high, threshold, first_head, b, h, sequence, DROPOUT)
        of_head = b * lse_strides[0] + h * lse_strides[1]
        slope2 = slope_of(SLOPES, slopes_stride, b, h)
        bounds = query_range(first, first + rows - 1, q_pos, q_len, left, right, M, CAUSAL, WINDOW)
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3):
            dk0, dk1, dv0, dv1 = _dkdv_range(
                dk0, dk1, dv0, dv1, k0, k1, v0, v1, head_of(Q, q_strides, b, h), head_of(DOUT, dout_strides, b, h),
                LSE2 + of_head, DELTA + of_head, lse_strides, DQ_BOXES, b.to(tl.int32),
                h.to(tl.int32), q_row, q_strides[1], dout_strides[1], bounds[phase], bounds[phase + 1], q_len, q_pos,
                k_pos, in_k, left, right, scale, softcap, slope2, keep_weight, dropout, D, D0, D1, E, E0, E1, M,
                phase != 1, CAUSAL, WINDOW, SOFTCAP, DUAL, STAGES, PRECISION,
            )  # fmt: skip
    if DROPOUT:
        dv0 *= keep_weight
        dv1 *= keep_weight
    dk_base = head_of(DK + part * dk_part_stride, dk_strides, b, h_kv)
    dv_base = head_of(DV + part * dv_part_stride, dv_strides, b, h_kv)
    store_columns(dk_base, row, dk_strides[1], rows, dk0 * scale, dk1 * scale, True, N, D0, D1, D, DUAL)
    store_columns(dv_base, row, dv_strides[1], rows, dv0, dv1, True, N, E0, E1, E, DUAL)
