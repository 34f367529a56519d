"""The formulas of energy.py's derivatives, written out in plain torch: any device, any dtype, any mask.

Low-precision inputs are computed in fp32, float64 in float64. Queries go in strips so that the logits of a long shard
never exist at once; grouped heads share their KV through a reshape, never a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import AttnSpec
from ..dropout import keep_weights
from ..energy import scores, visible
from ..layout import positions_of, sequences_of
from ..merge import NEG_INF, empty_state, state_dtype

STRIP = 256  # query rows at a time
DROPOUT_STRIP = 64  # with dropout: its mask takes several int64 words per pair


def attn_fwd(q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """Partial attention over segments; see `kernels.attn_fwd`."""
    keep = _Keep(q, k, q_segments, k_segments, spec)
    q, (k, v) = _blank(keep.q_seq, q)[0], _blank(keep.k_seq, k, v)
    return attn_fwd_masked(q, k, v, keep=keep, spec=spec)


def attn_fwd_masked(q: Tensor, k: Tensor, v: Tensor, *, keep, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """Partial attention under an explicit mask: keep bool [s_q, s_k], [b, s_q, s_k] or None (all visible).

    Dropout needs positions: `attn_fwd` gives them in a `_Keep`.
    """
    assert spec.dropout is None or isinstance(keep, _Keep)
    dtype = state_dtype(q.dtype)
    b, s_q, h, _ = q.shape
    out, lse = empty_state((b, s_q, h, v.shape[-1]), dtype=dtype, device=q.device)
    lse = lse.transpose(1, 2).contiguous()  # [b, h, s_q]
    if k.shape[1] == 0 or b == 0:
        return out, lse
    k, v = k.to(dtype), v.to(dtype)
    for rows in _strips(s_q, spec):
        s = scores(q[:, rows].to(dtype), k, spec, _strip(keep, rows))
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - torch.where(m == NEG_INF, 0.0, m))
        den = p.sum(-1, keepdim=True)
        safe = torch.where(den == 0, 1.0, den)
        p = p / safe
        if spec.dropout:
            p = p * keep.weights(rows, s)
        o = torch.einsum("bngqk,bknd->bqngd", p, v)
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
    (q, dout), (k, v) = _blank(keep.q_seq, q, dout), _blank(keep.k_seq, k, v)
    k, v = k.to(dtype), v.to(dtype)
    for rows in _strips(q.shape[1], spec):
        q_i, dout_i = q[:, rows].to(dtype), dout[:, rows].to(dtype)
        lse_i, delta_i = (x[..., rows].unflatten(1, (n, g)).unsqueeze(-1).to(dtype) for x in (lse, delta))
        s = scores(q_i, k, spec, keep[rows])
        p = torch.exp(s - torch.where(lse_i == NEG_INF, -NEG_INF, lse_i))  # [b, n, g, q, k]
        dout_i, q_i = (x.unflatten(2, (n, g)) for x in (dout_i, q_i))
        dropped, dp = p, torch.einsum("bqngd,bknd->bngqk", dout_i, v)
        if spec.dropout:
            weights = keep.weights(rows, s)
            dropped, dp = p * weights, dp * weights
        ds = p * (dp - delta_i) * spec.softmax_scale
        if spec.softcap:
            ds = ds * (1 - torch.where(s == NEG_INF, 0.0, s / spec.softcap) ** 2)
        dv += torch.einsum("bngqk,bqngd->bknd", dropped, dout_i)
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

    def weights(self, rows: slice, like: Tensor) -> Tensor:
        """Dropout's factors of the values, as `like` [b, n, g, rows, s_k]."""
        b, n, g = like.shape[:3]
        return keep_weights(
            self.spec.dropout,
            batch=b,
            num_heads=n * g,
            q_positions=self.q_pos[rows],
            k_positions=self.k_pos,
            q_sequences=self.q_seq[rows],
            dtype=like.dtype,
        ).unflatten(1, (n, g))


def _blank(sequences: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The tensors [b, s, ...] with zeros in rows of padding: 0 times what lies there must be 0, and it may be NaN."""
    padding = sequences < 0
    return [x.masked_fill(padding[:, None, None], 0) if padding.any() else x for x in tensors]


def _strips(num_rows: int, spec: AttnSpec):
    step = DROPOUT_STRIP if spec.dropout else STRIP
    return (slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))


def _strip(keep, rows: slice):
    return keep[..., rows, :] if isinstance(keep, Tensor) else None if keep is None else keep[rows]
