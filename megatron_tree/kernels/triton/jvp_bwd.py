"""Second order: the tangents of dq, dk and dv beside these, of dual tensors (jvp.py).

As the backward (bwd.py) dq goes by tiles of queries, and dk and dv by tiles of keys over all heads of a KV head:
deterministic, and added to the given fp32 buffers. STATISTICS fp32 [b, h, 4, s] holds lse in base 2 (+inf where a query
sees nothing), mu, delta and kappa of a query. The numbers at the formulas are those of docs/design.md, section 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, head_of, kept, key_range, query_range, segment_of, tile_of, window_mask
from .jvp import dual_dot, dual_logits, dual_scores, load_dual, store_dual


@triton.jit
def _load_statistics(base, row, stride, num_rows, ROWS: tl.constexpr, MASK: tl.constexpr):
    """(lse in base 2, mu, delta, kappa) of rows row..; weights are 0 beyond num_rows (if MASK)."""
    r = tl.arange(0, ROWS)
    at = base + row + r
    if MASK:
        ok = r < num_rows
        lse2 = tl.load(at, mask=ok, other=float("inf"))
        mu = tl.load(at + stride, mask=ok, other=0.0)
        delta = tl.load(at + 2 * stride, mask=ok, other=0.0)
        kappa = tl.load(at + 3 * stride, mask=ok, other=0.0)
    else:
        lse2, mu = tl.load(at), tl.load(at + stride)
        delta, kappa = tl.load(at + 2 * stride), tl.load(at + 3 * stride)
    return lse2, mu, delta, kappa


@triton.jit
def _weights(
    s, st, g, gt, lse2, mu, delta, kappa, q_pos, k_pos, in_range, left, right, scale, softcap, slope2, keep_weight,
    dropout,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(p, its tangent, ds, its tangent) from the products q.k and dout.v and their tangents; ds without softmax_scale,
    p without keep_weight. Statistics, positions and `in_range` broadcast."""
    s, st, slope, slopet = dual_logits(s, st, q_pos, k_pos, scale, softcap, slope2, SOFTCAP)
    p = tl.math.exp2(s - lse2)
    if MASK:
        p = tl.where(window_mask(q_pos, k_pos, in_range, left, right, CAUSAL, WINDOW), p, 0.0)
    pt = p * (st - mu)
    dropped, droppedt = p, pt
    if dropout is not None:
        keep = kept(q_pos, k_pos, dropout)
        dropped, droppedt = tl.where(keep, p, 0.0), tl.where(keep, pt, 0.0)
        g, gt = tl.where(keep, g * keep_weight, 0.0), tl.where(keep, gt * keep_weight, 0.0)
    g -= delta
    ds, dst = p * g, pt * g + p * (gt - kappa)  # (6) and (13)
    if SOFTCAP:
        ds, dst = ds * slope, dst * slope + ds * slopet
    return dropped, droppedt, ds, dst


@triton.jit
def _dq_range(
    dq, dqt, q, qt, dout, doutt, statistics, K, V, k_row, sk, sv, lo, hi, k_len, k_pos, q_pos, left, right, scale,
    softcap, slope2, keep_weight, dropout,
    D: tl.constexpr, D_COLS: tl.constexpr, E: tl.constexpr, E_COLS: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, N)
    lse2, mu, delta, kappa = statistics
    for n in tl.range(lo, hi, N, num_stages=STAGES):
        k, kt = load_dual(K, k_row + n, sk, k_len - n, N, D_COLS, D, MASK)
        v, vt = load_dual(V, k_row + n, sv, k_len - n, N, E_COLS, E, MASK)
        s, st = dual_scores(q, qt, k, kt)
        g, gt = dual_scores(dout, doutt, v, vt)
        _, _, ds, dst = _weights(
            s, st, g, gt, lse2[:, None], mu[:, None], delta[:, None], kappa[:, None], q_pos[:, None],
            (k_pos + n + cols)[None, :], (cols < k_len - n)[None, :], left, right, scale, softcap, slope2, keep_weight,
            dropout, MASK, CAUSAL, WINDOW, SOFTCAP,
        )  # fmt: skip
        dq, dqt = dual_dot(ds, dst, k, kt, dq, dqt)  # (7) and (14)
    return dq, dqt


@triton.jit(do_not_specialize=["seed_low", "seed_high", "threshold", "first_head"])
def attn_bwd_jvp_dq_kernel(
    Q, K, V, DOUT, STATISTICS, SLOPES, DQ, q_tiles, k_segments,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, statistics_strides, slopes_stride, left, right, scale,
    softcap, seed_low, seed_high, threshold, first_head, keep_weight,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DQ += this block's dq, dual; tables as in `attn_fwd_kernel`."""
    D_COLS: tl.constexpr = 2 * D0 if D1 > 0 else D0
    E_COLS: tl.constexpr = 2 * E0 if E1 > 0 else E0
    tile = q_tiles + 5 * tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row, rows, first = tile_of(tile)
    q_pos = first + tl.arange(0, M)
    q, qt = load_dual(head_of(Q, q_strides, b, h), row, q_strides[1], rows, M, D_COLS, D, True)
    dout, doutt = load_dual(head_of(DOUT, dout_strides, b, h), row, dout_strides[1], rows, M, E_COLS, E, True)
    dq = tl.zeros((M, D_COLS), tl.float32)
    dqt = tl.zeros((M, D_COLS), tl.float32)
    of_head = STATISTICS + b * statistics_strides[0] + h * statistics_strides[1]
    statistics = _load_statistics(of_head, row, statistics_strides[2], rows, M, True)
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
            dq, dqt = _dq_range(
                dq, dqt, q, qt, dout, doutt, statistics, k_base, v_base, k_row, k_strides[1], v_strides[1],
                bounds[phase], bounds[phase + 1], k_len, k_pos, q_pos, left, right, scale, softcap, slope2, keep_weight,
                dropout, D, D_COLS, E, E_COLS, N, phase != 1, CAUSAL, WINDOW, SOFTCAP, STAGES,
            )  # fmt: skip
    store_dual(
        head_of(DQ, dq_strides, b, h), row, dq_strides[1], rows, dq * scale, dqt * scale, True, M, D_COLS, D
    )  # fmt: skip


@triton.jit
def _dkdv_range(
    dk, dkt, dv, dvt, k, kt, v, vt, Q, DOUT, STATISTICS, q_row, sq, sd, statistics_stride, lo, hi, q_len, q_pos, k_pos,
    in_k, left, right, scale, softcap, slope2, keep_weight, dropout,
    D: tl.constexpr, D_COLS: tl.constexpr, E: tl.constexpr, E_COLS: tl.constexpr, M: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Transposed products [keys, queries]: the tile of keys is fixed, the loop runs over queries."""
    cols = tl.arange(0, M)
    for n in tl.range(lo, hi, M, num_stages=STAGES):
        rows = q_len - n
        q, qt = load_dual(Q, q_row + n, sq, rows, M, D_COLS, D, MASK)
        dout, doutt = load_dual(DOUT, q_row + n, sd, rows, M, E_COLS, E, MASK)
        lse2, mu, delta, kappa = _load_statistics(STATISTICS, q_row + n, statistics_stride, rows, M, MASK)
        s, st = dual_scores(k, kt, q, qt)
        g, gt = dual_scores(v, vt, dout, doutt)
        p, pt, ds, dst = _weights(
            s, st, g, gt, lse2[None, :], mu[None, :], delta[None, :], kappa[None, :], (q_pos + n + cols)[None, :],
            k_pos[:, None], in_k[:, None], left, right, scale, softcap, slope2, keep_weight, dropout, MASK, CAUSAL,
            WINDOW, SOFTCAP,
        )  # fmt: skip
        dv, dvt = dual_dot(p, pt, dout, doutt, dv, dvt)  # (5) and (12)
        dk, dkt = dual_dot(ds, dst, q, qt, dk, dkt)  # (7) and (14)
    return dk, dkt, dv, dvt


@triton.jit(do_not_specialize=["seed_low", "seed_high", "threshold", "first_head", "parts"])
def attn_bwd_jvp_dkdv_kernel(
    Q, K, V, DOUT, STATISTICS, SLOPES, DK, DV, k_tiles, q_segments,
    q_strides, k_strides, v_strides, dout_strides, dk_part_stride, dk_strides, dv_part_stride, dv_strides,
    statistics_strides, slopes_stride, left, right, scale, softcap, seed_low, seed_high, threshold, first_head,
    keep_weight, parts,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DK, DV [parts] += this block's, dual; tables and parts as in `attn_bwd_dkdv_kernel`."""
    D_COLS: tl.constexpr = 2 * D0 if D1 > 0 else D0
    E_COLS: tl.constexpr = 2 * E0 if E1 > 0 else E0
    tile = k_tiles + 5 * tl.program_id(0)
    h_kv = (tl.program_id(1) // parts).to(tl.int64)
    part = (tl.program_id(1) % parts).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row, rows, first = tile_of(tile)
    r = tl.arange(0, N)
    k_pos = first + r
    in_k = r < rows
    k, kt = load_dual(head_of(K, k_strides, b, h_kv), row, k_strides[1], rows, N, D_COLS, D, True)
    v, vt = load_dual(head_of(V, v_strides, b, h_kv), row, v_strides[1], rows, N, E_COLS, E, True)
    dk = tl.zeros((N, D_COLS), tl.float32)
    dkt = tl.zeros((N, D_COLS), tl.float32)
    dv = tl.zeros((N, E_COLS), tl.float32)
    dvt = tl.zeros((N, E_COLS), tl.float32)
    from_segment = tl.load(tile + 3)
    num_segments = tl.load(tile + 4) - from_segment
    heads = GROUP // parts
    for i in range(heads * num_segments):
        h = h_kv * GROUP + part * heads + i // num_segments
        q_row, q_len, q_pos, sequence = segment_of(q_segments + 4 * (from_segment + i % num_segments))
        dropout = None
        if DROPOUT:
            dropout = (seed_low, seed_high, threshold, first_head + h.to(tl.int32), b.to(tl.int32) + sequence)
        of_head = STATISTICS + b * statistics_strides[0] + h * statistics_strides[1]
        slope2 = None
        if SLOPES is not None:
            slope2 = tl.load(SLOPES + b * slopes_stride + h) * LOG2E
        bounds = query_range(first, first + rows - 1, q_pos, q_len, left, right, M, CAUSAL, WINDOW)
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3):
            dk, dkt, dv, dvt = _dkdv_range(
                dk, dkt, dv, dvt, k, kt, v, vt, head_of(Q, q_strides, b, h), head_of(DOUT, dout_strides, b, h), of_head,
                q_row, q_strides[1], dout_strides[1], statistics_strides[2], bounds[phase], bounds[phase + 1], q_len,
                q_pos, k_pos, in_k, left, right, scale, softcap, slope2, keep_weight, dropout, D, D_COLS, E, E_COLS, M,
                phase != 1, CAUSAL, WINDOW, SOFTCAP, STAGES,
            )  # fmt: skip
    if DROPOUT:
        dv *= keep_weight
        dvt *= keep_weight
    dk_base = head_of(DK + part * dk_part_stride, dk_strides, b, h_kv)
    dv_base = head_of(DV + part * dv_part_stride, dv_strides, b, h_kv)
    store_dual(dk_base, row, dk_strides[1], rows, dk * scale, dkt * scale, True, N, D_COLS, D)
    store_dual(dv_base, row, dv_strides[1], rows, dv, dvt, True, N, E_COLS, E)
