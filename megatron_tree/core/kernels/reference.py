"""The derivatives of the energy written out in plain torch: any device, any dtype, any mask.

Low-precision inputs are computed in fp32, float64 in float64. Queries go in strips so that the logits of a long shard
never exist at once; grouped heads share their KV through a reshape, never a copy. The numbers at the formulas are those
of docs/design.md, section 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..dropout import keep_weights
from ..duals import dual_product, halves, swapped
from ..layout import positions_of, sequences_of
from ..merge import NEG_INF, State, empty_state, state_dtype
from ..spec import AttnSpec
from .blocks import SelectedKeys, alibi_bias, window_mask
from .kv_cache import KVCache, decode_masked

STRIP = 256  # query rows at a time
DROPOUT_STRIP = 64  # with dropout: its mask takes several int64 words per pair


def unsupported(q, k, v, spec: AttnSpec, *, flowing_lse: bool, masked: bool, decodes: bool) -> None:
    """Why this backend can't take the call: it takes every one."""


def attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None, selected=None
) -> tuple[Tensor, Tensor]:
    """See `Backend.attn_fwd`; out_dtype changes nothing."""
    pairs = _Pairs(q, k, q_segments, k_segments, spec, selected)
    q, (k, v) = _blank(pairs.q_seq, q)[0], _blank(pairs.k_seq, k, v)
    return _attend(q, k, v, spec, pairs.mask, pairs.bias, pairs.dropout_weights if spec.dropout else None)


def attn_masked(
    q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None, bias: Tensor | None = None, spec: AttnSpec
) -> tuple[Tensor, Tensor]:
    """Partial attention under a mask: keep bool [s_q, s_k], [b, s_q, s_k] or None (all visible), bias [b, h, s_q, s_k]
    or None."""
    assert spec.dropout is None, "dropout needs positions"
    of_rows = lambda x: lambda rows: None if x is None else x[..., rows, :]  # noqa: E731
    return _attend(q, k, v, spec, of_rows(keep), of_rows(bias))


def attn_decode(q: Tensor, cache: KVCache, spec: AttnSpec) -> Tensor:
    """See `Backend.attn_decode`."""
    return decode_masked(attn_masked, q, cache, spec)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    keep_of: Callable,
    bias_of: Callable,
    weights_of: Callable | None = None,
) -> tuple[Tensor, Tensor]:
    """The state of q, strip by strip: keep_of(rows) is the mask of these query rows, bias_of(rows) what is added to
    their logits, weights_of(rows) dropout's factors of the values."""
    dtype = state_dtype(q.dtype)
    out, lse = empty_state((*q.shape[:3], v.shape[-1]), dtype=dtype, device=q.device)
    if k.shape[1] == 0 or q.shape[0] == 0:
        return out, lse
    k, v = k.to(dtype), v.to(dtype)
    for rows in _strips(q.shape[1], spec):
        s = _with_mask(logits(q[:, rows].to(dtype), k, spec), keep_of(rows), bias_of(rows))
        out[:, rows], lse[..., rows] = _state_of(s, v, None if weights_of is None else weights_of(rows))
    return out, lse


def _state_of(s: Tensor, v: Tensor, weights: Tensor | None = None) -> State:
    """(out [b, s_q, n * g, d_v], lse [b, n * g, s_q]) of logits s [b, n, g, s_q, s_k] and v [b, s_k, n, d_v]. weights:
    dropout's factors of the values."""
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(m == NEG_INF, 0.0, m))
    den = p.sum(-1, keepdim=True)
    safe = torch.where(den == 0, 1.0, den)
    p = p / safe
    if weights is not None:
        p = p * weights
    lse = torch.where(den == 0, NEG_INF, m + torch.log(safe)).squeeze(-1).flatten(1, 2)  # F(0): (2)
    return torch.einsum("bngqk,bknd->bqngd", p, v).flatten(2, 3), lse  # dF/dzeta: (3)


def attn_bwd(
    dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec, selected=None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.attn_bwd`."""
    dtype = state_dtype(q.dtype)
    pairs = _Pairs(q, k, q_segments, k_segments, spec, selected)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
    if k.shape[1] == 0:
        return dq, dk, dv
    (q, dout), (k, v) = _blank(pairs.q_seq, q, dout), _blank(pairs.k_seq, k, v)
    k, v = k.to(dtype), v.to(dtype)
    for rows in _strips(q.shape[1], spec):
        of_rows = q[:, rows].to(dtype), k, v, dout[:, rows].to(dtype), lse[..., rows], delta[..., rows]
        weights = pairs.dropout_weights(rows) if spec.dropout else None
        dq[:, rows], dk_i, dv_i = _grads_of(*of_rows, spec, pairs.mask(rows), pairs.bias(rows), weights)
        dk += dk_i
        dv += dv_i
    return dq, dk, dv


def _grads_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    spec: AttnSpec,
    keep: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a strip of queries, dense under the mask keep; tensors are in the dtype of states.

    weights: dropout's factors of the values, [b, n, g, s_q, s_k].
    """
    group = k.shape[2], q.shape[2] // k.shape[2]
    lse, delta = (x.unflatten(1, group).unsqueeze(-1).to(q.dtype) for x in (lse, delta))
    unmasked = logits(q, k, spec)
    s = _with_mask(unmasked, keep, bias)
    p = torch.exp(s - torch.where(lse == NEG_INF, -NEG_INF, lse))  # [b, n, g, q, k]
    dout, q = (x.unflatten(2, group) for x in (dout, q))
    dropped, dp = p, torch.einsum("bqngd,bknd->bngqk", dout, v)
    if weights is not None:
        dropped, dp = p * weights, dp * weights
    ds = p * (dp - delta)  # d2F/ds dzeta: (6)
    if spec.softcap:
        ds = ds * (1 - (unmasked / spec.softcap) ** 2)
    ds = ds * spec.softmax_scale
    dq = torch.einsum("bngqk,bknd->bqngd", ds, k).flatten(2, 3)  # d2F/dq dzeta: (7)
    dk = torch.einsum("bngqk,bqngd->bknd", ds, q)  # d2F/dk dzeta: (7)
    dv = torch.einsum("bngqk,bqngd->bknd", dropped, dout)  # d2F/dv dzeta: (5)
    return dq, dk, dv


def takes_duals(dtype: torch.dtype, width: int) -> bool:
    """See `Backend.for_duals`."""
    return True


def attn_jvp(
    q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None, selected=None
) -> tuple[Tensor, Tensor]:
    """`attn_fwd` of dual tensors, see `Backend.for_duals`; out_dtype changes nothing."""
    dtype, pairs, d_v = state_dtype(q.dtype), _Pairs(q, k, q_segments, k_segments, spec, selected), v.shape[-1] // 2
    out, lse = empty_state((*q.shape[:3], 2 * d_v + 1), dtype=dtype, device=q.device)
    if k.shape[1] == 0 or q.shape[0] == 0:
        return out, lse
    q, (k, v) = _blank(pairs.q_seq, q)[0], _blank(pairs.k_seq, k, v)
    k, v = k.to(dtype), v.to(dtype)
    for rows, keys, keep in pairs.strips():
        s, st = _dual_logits(q[:, rows].to(dtype) * spec.softmax_scale, k[:, keys], spec)
        s = _hidden_(s, keep, pairs.bias(rows, keys))
        m = s.amax(-1, keepdim=True)
        p = s.sub_(torch.where(m == NEG_INF, 0.0, m)).exp_()
        den = p.sum(-1, keepdim=True)
        safe = torch.where(den == 0, 1.0, den)
        lse[..., rows] = torch.where(den == 0, NEG_INF, m + torch.log(safe)).squeeze(-1).flatten(1, 2)
        pst = st.mul_(p)
        mu = pst.sum(-1, keepdim=True)  # (9)
        if spec.dropout:
            weights = pairs.dropout_weights(rows, keys)
            p, pst = p.mul_(weights), pst.mul_(weights)
        of_values = dual_product("bngqk,bknd->bngqd", p, pst, v[:, keys])  # (3) and (10)
        out[:, rows] = (torch.cat((of_values, mu), -1) / safe).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out, lse


def attn_bwd_jvp(
    dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec, selected=None
) -> tuple[Tensor, Tensor, Tensor]:
    """`attn_bwd` of dual tensors, see `Backend.for_duals`."""
    dtype, pairs = state_dtype(q.dtype), _Pairs(q, k, q_segments, k_segments, spec, selected)
    group = (k.shape[2], q.shape[2] // k.shape[2])
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
    if k.shape[1] == 0:
        return dq, dk, dv
    (q, dout), (k, v) = _blank(pairs.q_seq, q, dout), _blank(pairs.k_seq, k, v)
    k, v = k.to(dtype), v.to(dtype)
    for rows, keys, keep in pairs.strips():
        q_i, dout_i = q[:, rows].to(dtype) * spec.softmax_scale, dout[:, rows].to(dtype)
        k_i, v_i = k[:, keys], v[:, keys]
        statistics = (x[..., rows, :].unflatten(1, group).unsqueeze(-2).to(dtype) for x in (lse, delta))
        (lse_i, mu), (delta_i, kappa) = (x.unbind(-1) for x in statistics)  # [b, n, g, q, 1] each
        capped, st = _dual_logits(q_i, k_i, spec)
        s = _hidden_(capped.clone() if spec.softcap else capped, keep, pairs.bias(rows, keys))
        p = s.sub_(torch.where(lse_i == NEG_INF, -NEG_INF, lse_i)).exp_()
        dout_i, q_i = (x.unflatten(2, group) for x in (dout_i, q_i))
        g = torch.einsum("bqngd,bknd->bngqk", halves(dout_i)[0], halves(v_i)[0])
        gt = torch.einsum("bqngd,bknd->bngqk", swapped(dout_i), v_i)
        pt = (st - mu).mul_(p)  # the tangent of p
        dropped, droppedt = p, pt
        if spec.dropout:
            weights = pairs.dropout_weights(rows, keys)
            dropped, droppedt, g, gt = (x * weights for x in (p, pt, g, gt))
        dv[:, keys] += dual_product("bngqk,bqngd->bknd", dropped, droppedt, dout_i)  # (5) and (12)
        g, gt = g.sub_(delta_i), gt.sub_(kappa)
        dst = pt.mul_(g).addcmul_(p, gt)  # (13)
        ds = g.mul_(p)  # (6)
        if spec.softcap:
            slope = 1 - (capped / spec.softcap) ** 2
            ds, dst = ds * slope, dst * slope - 2 * ds * st * capped / spec.softcap**2
        dq_i = dual_product("bngqk,bknd->bqngd", ds, dst, k_i)  # (7) and (14)
        dq[:, rows] = dq_i.mul_(spec.softmax_scale).flatten(2, 3)
        dk[:, keys] += dual_product("bngqk,bqngd->bknd", ds, dst, q_i)  # (7) and (14)
    return dq, dk, dv


def _dual_logits(q: Tensor, k: Tensor, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """`logits` and their tangents, of dual tensors; q is scaled."""
    q = q.unflatten(2, (k.shape[2], -1))
    s = torch.einsum("bqngd,bknd->bngqk", halves(q)[0], halves(k)[0])
    st = torch.einsum("bqngd,bknd->bngqk", swapped(q), k)
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
        st = st * (1 - (s / spec.softcap) ** 2)
    return s, st


def logits(q: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
    """[b, n, g, s_q, s_k] of q [b, s_q, n * g, d] and k [b, s_k, n, d], with softcap applied."""
    s = torch.einsum("bqngd,bknd->bngqk", q.unflatten(2, (k.shape[2], -1)), k) * spec.softmax_scale
    return spec.softcap * torch.tanh(s / spec.softcap) if spec.softcap else s


def _hidden_(s: Tensor, keep: Tensor, bias: Tensor | None) -> Tensor:
    """`_with_mask` in place, under a mask [s_q, s_k] or [b, s_q, s_k]."""
    if bias is not None:
        s += bias.unflatten(1, s.shape[1:3])
    hidden = ~(keep[:, None, None] if keep.dim() == 3 else keep)
    some = hidden.flatten(0, -2).any(0).nonzero()[:, 0]
    if len(some):
        keys = slice(int(some[0]), int(some[-1]) + 1)  # under a causal mask the last few
        s[..., keys].masked_fill_(hidden[..., keys], NEG_INF)
    return s


def _with_mask(s: Tensor, keep: Tensor | None, bias: Tensor | None) -> Tensor:
    """s_a of (1) from logits [b, n, g, s_q, s_k]: biased, and -inf for hidden pairs."""
    if bias is not None:
        s = s + bias.unflatten(1, s.shape[1:3])
    if keep is not None:
        s = s.masked_fill(~(keep[:, None, None] if keep.dim() == 3 else keep), NEG_INF)
    return s


class _Pairs:
    """The (query, key) pairs of two lists of segments, strip by strip; padding sees nothing, and nothing sees it."""

    def __init__(self, q: Tensor, k: Tensor, q_segments, k_segments, spec: AttnSpec, selected: Tensor | None = None):
        self.spec, self.dtype = spec, state_dtype(q.dtype)
        self.heads = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
        self.q_pos, self.k_pos = (
            positions_of(s, x.shape[1], device=x.device) for s, x in ((q_segments, q), (k_segments, k))
        )
        self.q_seq, self.k_seq = (
            sequences_of(s, x.shape[1], device=x.device) for s, x in ((q_segments, q), (k_segments, k))
        )
        self.selected = None if selected is None else SelectedKeys(selected, self.q_seq, self.k_seq, self.k_pos)

    def mask(self, rows: slice, keys: slice | Tensor = slice(None)) -> Tensor:
        """bool [rows, keys], or [b, rows, keys] where keys are selected."""
        q_seq = self.q_seq[rows, None]
        same = q_seq.masked_fill(q_seq < 0, -2) == self.k_seq[keys]  # padding, -1, is in no sequence
        mask = window_mask(self.q_pos[rows], self.k_pos[keys], self.spec) & same
        return mask if self.selected is None else mask & self.selected.mask(rows)[..., keys]

    def strips(self) -> Iterator[tuple[slice, slice | Tensor, Tensor]]:
        """(query rows, keys, the mask of these pairs), without the keys that none of these rows can see."""
        spec = self.spec
        for rows in _strips(len(self.q_pos), spec):
            (q_first, q_last), (first, last) = (x[rows].aminmax() for x in (self.q_pos, self.q_seq))
            seen = (self.k_seq >= first.clamp(min=0)) & (self.k_seq <= last)
            if spec.left is not None:
                seen &= self.k_pos >= q_first - spec.left
            if spec.right is not None:
                seen &= self.k_pos <= q_last + spec.right
            keys = seen.nonzero()[:, 0]
            if len(keys) == 0:
                continue
            ends = int(keys[0]), int(keys[-1]) + 1
            keys = slice(*ends) if ends[1] - ends[0] == len(keys) else keys  # a view where there are no gaps
            yield rows, keys, self.mask(rows, keys)

    def bias(self, rows: slice, keys: slice | Tensor = slice(None)) -> Tensor | None:
        """What ALiBi adds to logits, [1 or b, h, rows, keys]; None where it is off."""
        if self.spec.alibi_slopes is None:
            return None
        return alibi_bias(self.spec, self.q_pos[rows], self.k_pos[keys], self.dtype)

    def dropout_weights(self, rows: slice, keys: slice | Tensor = slice(None)) -> Tensor:
        """Dropout's factors of the values, [b, n, g, rows, keys]."""
        b, n, g = self.heads
        return keep_weights(
            self.spec.dropout,
            batch=b,
            num_heads=n * g,
            q_positions=self.q_pos[rows],
            k_positions=self.k_pos[keys],
            q_sequences=self.q_seq[rows],
            dtype=self.dtype,
        ).unflatten(1, (n, g))


def _blank(sequences: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The tensors [b, s, ...] with zeros in rows of padding: 0 times what lies there must be 0, and it may be NaN."""
    padding = sequences < 0
    return [x.masked_fill(padding[:, None, None], 0) if padding.any() else x for x in tensors]


def _strips(num_rows: int, spec: AttnSpec):
    step = DROPOUT_STRIP if spec.dropout else STRIP
    return (slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))
