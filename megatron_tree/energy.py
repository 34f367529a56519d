"""The energy whose derivatives are attention (Tree Attention, arXiv 2408.04093, section 4), told by autograd.

For one query q with keys k_a, values v_a and a source vector zeta

    F(zeta) = log sum_a exp(s_a + zeta . v_a),      s_a = softmax_scale * q . k_a

- output:   o = dF/dzeta at zeta = 0                        (`attention`)
- lse:      F(0)
- merge:    F of a whole = log-sum-exp of F over its parts   (`merge_by_energy`)
- backward: for an upstream g the loss is d/de F(e * g) at e = 0; differentiating that again by q, k, v gives
            the attention backward                           (`attention_grads`)

A sink is one more term with score `sinks[h]` and value 0. Under dropout the value that a query finds at key a is
keep_a / (1 - p) * v_a (`dropout.keep_weights`): out and its gradients change, lse = F(0) does not.

Everything here is dense and plain: it is the oracle of the tests when called in float64, and it is read before any
kernel is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import AttnSpec

NEG_INF = float("-inf")


def visible(q_positions: Tensor, k_positions: Tensor, spec: AttnSpec) -> Tensor:
    """Which keys a query may see: bool [..., s_q, s_k] from integer positions [..., s_q] and [..., s_k]."""
    distance = q_positions[..., :, None] - k_positions[..., None, :]
    keep = torch.ones_like(distance, dtype=torch.bool)
    if spec.left is not None:
        keep &= distance <= spec.left
    if spec.right is not None:
        keep &= distance >= -spec.right
    return keep


def scores(q: Tensor, k: Tensor, spec: AttnSpec, keep: Tensor | None = None) -> Tensor:
    """Logits [b, h_kv, g, s_q, s_k] of q [b, s_q, h, d] and k [b, s_k, h_kv, d], g = h / h_kv; hidden ones are -inf."""
    b, s_q, h, d = q.shape
    h_kv = k.shape[2]
    s = torch.einsum("bqngd,bknd->bngqk", q.reshape(b, s_q, h_kv, h // h_kv, d), k) * spec.softmax_scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if keep is not None:
        s = s.masked_fill(~(keep[:, None, None] if keep.dim() == 3 else keep), NEG_INF)
    return s


def logsumexp(s: Tensor) -> Tensor:
    """log sum exp over the last axis; -inf, with zero gradients, where every term is -inf."""
    if s.shape[-1] == 0:
        return s.sum(-1) + NEG_INF  # stays in the graph
    m = s.detach().amax(-1, keepdim=True)
    m = torch.where(m == NEG_INF, torch.zeros_like(m), m)
    total = torch.exp(s - m).sum(-1)
    empty = total == 0
    return torch.where(empty, NEG_INF, m.squeeze(-1) + torch.log(torch.where(empty, 1.0, total)))


def energy(q, k, v, zeta: Tensor, spec: AttnSpec, keep=None, sinks=None, keep_weights=None) -> Tensor:
    """F(zeta) [b, s_q, h] for a source zeta [b, s_q, h, d_v]; v [b, s_k, h_kv, d_v]; sinks [h] or None.

    keep_weights [b, h, s_q, s_k]: what dropout multiplies each pair's value by.
    """
    assert spec.dropout is None or keep_weights is not None, "the oracle takes dropout as keep_weights"
    b, s_q, h, _ = q.shape
    h_kv = v.shape[2]
    source = torch.einsum("bqngd,bknd->bngqk", zeta.reshape(b, s_q, h_kv, h // h_kv, v.shape[-1]), v)
    if keep_weights is not None:
        source = source * keep_weights.unflatten(1, (h_kv, h // h_kv))
    terms = scores(q, k, spec, keep) + source
    if sinks is not None:
        leaf = sinks.to(terms.dtype).reshape(1, h_kv, h // h_kv, 1, 1).expand(b, -1, -1, s_q, 1)
        terms = torch.cat((terms, leaf), -1)
    return logsumexp(terms).permute(0, 3, 1, 2).reshape(b, s_q, h)


def _derive(q, k, v, spec, keep, sinks, keep_weights, create_graph):
    with torch.enable_grad():
        zeta = q.new_zeros(*q.shape[:3], v.shape[-1]).requires_grad_()
        f = energy(q, k, v, zeta, spec, keep, sinks, keep_weights)
        (out,) = torch.autograd.grad(f.sum(), zeta, create_graph=create_graph)
    return out, f


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, spec: AttnSpec, keep: Tensor | None = None, sinks=None, keep_weights=None
) -> tuple[Tensor, Tensor]:
    """Attention as the gradient of the energy.

    Args: q [b, s_q, h, d], k [b, s_k, h_kv, d], v [b, s_k, h_kv, d_v], any one dtype; keep bool [s_q, s_k] or
    [b, s_q, s_k]; sinks [h]; keep_weights [b, h, s_q, s_k], needed where spec has dropout. Returns: out
    [b, s_q, h, d_v], lse [b, h, s_q] in the inputs' dtype; a query that sees nothing gets out 0 and lse -inf.
    """
    out, f = _derive(q, k, v, spec, keep, sinks, keep_weights, create_graph=False)
    return out.detach(), f.detach().transpose(1, 2)


def attention_grads(
    q, k, v, dout, *, spec: AttnSpec, keep=None, sinks=None, dlse=None, keep_weights=None
) -> tuple[Tensor, ...]:
    """Gradients (dq, dk, dv) and, with sinks, dsinks: the second derivative of the energy along dout [b, s_q, h, d_v].

    dlse [b, h, s_q] adds the gradient that flows through the returned lse = F(0).
    """
    leaves = [t.detach().requires_grad_() for t in ((q, k, v) if sinks is None else (q, k, v, sinks))]
    q, k, v = leaves[:3]
    sinks = leaves[3] if sinks is not None else None
    out, f = _derive(q, k, v, spec, keep, sinks, keep_weights, create_graph=True)
    loss = (out * dout).sum()
    if dlse is not None:
        lse = f.transpose(1, 2)
        loss = loss + torch.where(lse == NEG_INF, 0.0, lse * dlse).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves))


def merge_by_energy(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The merge rule, derived: outs [n, ..., d], lses [n, ...] of n parts -> (out, lse) of the whole.

    A part is F_i(zeta) = lse_i + zeta . out_i to first order; the whole is their log-sum-exp, its gradient the output.
    """
    with torch.enable_grad():
        zeta = torch.zeros_like(outs[0]).requires_grad_()
        f = logsumexp(torch.movedim(lses + (zeta * outs).sum(-1), 0, -1))
        (out,) = torch.autograd.grad(f.sum(), zeta)
    return out, f.detach()
