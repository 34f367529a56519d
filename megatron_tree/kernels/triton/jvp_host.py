"""The backend's functions of dual tensors (duals.py): tangents, and second order."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import AttnSpec
from ...merge import empty_state
from . import host, jvp, jvp_bwd

MAX_HEAD_DIM_FP32 = 128  # wider tiles of values and tangents spill registers, and exceed the memory of sm_86


def takes_duals(dtype: torch.dtype, width: int) -> bool:
    """See `Backend.of_duals`."""
    return dtype != torch.float32 or width <= MAX_HEAD_DIM_FP32


@host.on_its_device
def attn_jvp(
    q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None
) -> tuple[Tensor, Tensor]:
    """See `Backend.of_duals`; one launch. out is fp32, whatever out_dtype: r - mu out cancels digits."""
    b, s_q, h, _ = q.shape
    out, lse = empty_state((b, s_q, h, v.shape[-1] + 1), device=q.device)
    if 0 in (b, len(q_segments), len(k_segments)):
        return out, lse
    d, e = _half_dims(q, v)
    tiles = host.tiles_for("jvp", q, d, e, spec)
    q_tiles, k_table = host.tables(q_segments, k_segments, tiles.m, q.device)
    jvp.attn_jvp_kernel[(q_tiles.shape[0], h, b)](
        **host.operands(Q=q, K=k, V=v), OUT=out, LSE=lse, **host.alibi_slopes(spec, q), q_tiles=q_tiles,
        k_segments=k_table, out_strides=out.stride()[:3], lse_strides=lse.stride()[:2],
        **host.fixed(spec, spec.softmax_scale, h // k.shape[2], d, e, tiles),
    )  # fmt: skip
    return out, lse


@host.on_its_device
def attn_bwd_jvp(dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.of_duals`."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    if 0 in (len(q), len(q_segments), len(k_segments)):
        return dq, dk, dv
    (lse, mu), (delta, kappa) = lse.unbind(-1), delta.unbind(-1)
    statistics = torch.stack((host.in_base_2(lse), mu, delta, kappa), 2)  # [b, h, 4, s_q]
    given = host.operands(Q=q, K=k, V=v, DOUT=dout.to(q.dtype)) | host.alibi_slopes(spec, q)
    given |= dict(STATISTICS=statistics, statistics_strides=statistics.stride()[:3])
    segments, dims = dict(q_segments=q_segments, k_segments=k_segments, spec=spec), _half_dims(q, v)
    for_dq, for_dkdv = (host.tiles_for(name, q, *dims, spec) for name in ("dq_jvp", "dkdv_jvp"))
    host.launch_dq(jvp_bwd.attn_bwd_jvp_dq_kernel, given, dq, for_dq, dims, **segments)
    host.launch_dkdv(jvp_bwd.attn_bwd_jvp_dkdv_kernel, given, dk, dv, for_dkdv, dims, **segments)
    return dq, dk, dv


def _half_dims(q: Tensor, v: Tensor) -> tuple[int, int]:
    return q.shape[-1] // 2, v.shape[-1] // 2
