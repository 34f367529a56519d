"""The formulas of energy.py's derivatives, written out in plain torch: any device, any dtype, any mask.

Low-precision inputs are computed in fp32, float64 in float64. Queries go in strips so that the logits of a long shard
never exist at once; grouped heads share their KV through a reshape, never a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import AttnSpec
from ..energy import scores, visible
from ..merge import NEG_INF, empty_state, state_dtype
from ..shard import positions_of, sequences_of

STRIP = 256  # query rows at a time


def attn_fwd(q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """Partial attention over segments; see `kernels.attn_fwd`."""
    return attn_fwd_masked(q, k, v, keep=_Keep(q, k, q_segments, k_segments, spec), spec=spec)


def attn_fwd_masked(q: Tensor, k: Tensor, v: Tensor, *, keep, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """Partial attention under an explicit mask: keep bool [s_q, s_k], [b, s_q, s_k] or None (all visible)."""
    dtype = state_dtype(q.dtype)
    b, s_q, h, _ = q.shape
    out, lse = empty_state((b, s_q, h, v.shape[-1]), dtype=dtype, device=q.device)
    lse = lse.transpose(1, 2).contiguous()  # [b, h, s_q]
    if k.shape[1] == 0 or b == 0:
        return out, lse
    k, v = k.to(dtype), v.to(dtype)
    for i in range(0, s_q, STRIP):
        rows = slice(i, min(i + STRIP, s_q))
        s = scores(q[:, rows].to(dtype), k, spec, _strip(keep, rows))
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - torch.where(m == NEG_INF, 0.0, m))
        den = p.sum(-1, keepdim=True)
        safe = torch.where(den == 0, 1.0, den)
        o = torch.einsum("bngqk,bknd->bqngd", p / safe, v)
        out[:, rows] = o.flatten(2, 3)
        lse[..., rows] = torch.where(den == 0, NEG_INF, m + torch.log(safe)).squeeze(-1).flatten(1, 2)
    return out, lse


def attn_bwd(dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """This block's dq, dk, dv from the global lse and delta; see `kernels.attn_bwd`."""
    dtype = state_dtype(q.dtype)
    keep = _Keep(q, k, q_segments, k_segments, spec)
    n, g = k.shape[2], q.shape[2] // k.shape[2]
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=dtype, device=q.device)
    dv = torch.zeros(v.shape, dtype=dtype, device=q.device)
    if k.shape[1] == 0:
        return dq, dk, dv
    k, v = k.to(dtype), v.to(dtype)
    for i in range(0, q.shape[1], STRIP):
        rows = slice(i, min(i + STRIP, q.shape[1]))
        q_i, dout_i = q[:, rows].to(dtype), dout[:, rows].to(dtype)
        lse_i, delta_i = (x[..., rows].unflatten(1, (n, g)).unsqueeze(-1).to(dtype) for x in (lse, delta))
        s = scores(q_i, k, spec, keep[rows])
        p = torch.exp(s - torch.where(lse_i == NEG_INF, -NEG_INF, lse_i))  # [b, n, g, q, k]
        dout_i, q_i = (x.unflatten(2, (n, g)) for x in (dout_i, q_i))
        ds = p * (torch.einsum("bqngd,bknd->bngqk", dout_i, v) - delta_i) * spec.softmax_scale
        if spec.softcap:
            ds = ds * (1 - torch.where(s == NEG_INF, 0.0, s / spec.softcap) ** 2)
        dv += torch.einsum("bngqk,bqngd->bknd", p, dout_i)
        dk += torch.einsum("bngqk,bqngd->bknd", ds, q_i)
        dq[:, rows] = torch.einsum("bngqk,bknd->bqngd", ds, k).flatten(2, 3)
    return dq, dk, dv


class _Keep:
    """The mask of two lists of segments, made strip by strip; padding sees nothing, and nothing sees it."""

    def __init__(self, q: Tensor, k: Tensor, q_segments, k_segments, spec: AttnSpec):
        self.spec = spec
        self.q_pos, self.k_pos = (
            positions_of(s, x.shape[1], device=x.device) for s, x in ((q_segments, q), (k_segments, k))
        )
        self.q_seq, self.k_seq = (
            sequences_of(s, x.shape[1], device=x.device) for s, x in ((q_segments, q), (k_segments, k))
        )

    def __getitem__(self, rows: slice) -> Tensor:
        q_seq = self.q_seq[rows, None]
        return visible(self.q_pos[rows], self.k_pos, self.spec) & (q_seq == self.k_seq) & (q_seq >= 0)


def _strip(keep, rows: slice):
    return keep[..., rows, :] if isinstance(keep, Tensor) else None if keep is None else keep[rows]
