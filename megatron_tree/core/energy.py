"""The energy whose derivatives are attention (Tree Attention, arXiv 2408.04093, section 4), taken by autograd.

For one query q with keys k_a, values v_a and a source vector zeta

    F(zeta) = log sum_a exp(s_a + zeta . v_a),      s_a = softmax_scale * q . k_a           (1)

- statistics: lse = F(0)                                                       (2)
- output:     out = dF/dzeta at zeta = 0                                       (3)    `attention`
- merge:      F of a whole = log-sum-exp of F over its parts                   (4)    `merge_by_energy`
- backward:   the derivatives of dout . out = d/de F(e dout) by q, k and v     (5-8)  `attention_grads`
- tangents:   the derivatives of F and dF/dzeta along tangents of q, k and v   (9-11) `attention_tangents`
- second:     the tangents of the backward, third derivatives of F            (12-15) `attention_grads_tangents`

The numbers are those of docs/design.md, section 1; the code that computes a formula in closed form names its number.
A sink is one more term with score `sinks[h]` and value 0. Under dropout the value that a query finds at key a is
keep_a / (1 - p) * v_a (`dropout.keep_weights`): out and its gradients change, lse = F(0) does not.

Everything here is dense and plain. Called in float64 it is the oracle of the tests, so it shares no code with the
kernels that it judges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import AttnSpec

NEG_INF = float("-inf")


def energy(q, k, v, zeta: Tensor, spec: AttnSpec, keep=None, sinks=None, keep_weights=None, distance=None) -> Tensor:
    """F(zeta) [b, h, s_q], equation (1), for a source zeta [b, s_q, h, d_v].

    Args: q [b, s_q, h, d], k [b, s_k, h_kv, d], v [b, s_k, h_kv, d_v]; keep bool [s_q, s_k] or [b, s_q, s_k], the
    visible pairs; sinks [h]; keep_weights [b, h, s_q, s_k], the factors that dropout gives the values; distance
    [s_q, s_k] or [b, s_q, s_k] between the positions, for spec.alibi_slopes.
    """
    assert spec.dropout is None or keep_weights is not None, "the oracle takes dropout as keep_weights"
    source = torch.einsum("bqhd,bkhd->bhqk", zeta, _repeated(v, zeta))
    if keep_weights is not None:
        source = source * keep_weights
    terms = scores(q, k, spec, keep, distance) + source
    if sinks is not None:
        leaf = sinks.to(terms.dtype)[:, None, None].expand(*terms.shape[:3], 1)
        terms = torch.cat((terms, leaf), -1)
    return logsumexp(terms)


def attention(
    q, k, v, *, spec: AttnSpec, keep: Tensor | None = None, sinks=None, keep_weights=None, distance=None
) -> tuple[Tensor, Tensor]:
    """Attention as the gradient of the energy, equations (2) and (3). Arguments as in `energy`, all of one dtype.

    Returns: out [b, s_q, h, d_v] and lse [b, h, s_q] in that dtype; a query that sees nothing gets out 0, lse -inf.
    """
    out, lse = _first_derivative(q, k, v, spec, keep, sinks, keep_weights, distance, create_graph=False)
    return out.detach(), lse.detach()


def attention_grads(
    q, k, v, dout, *, spec: AttnSpec, keep=None, sinks=None, dlse=None, keep_weights=None, distance=None
) -> tuple[Tensor, ...]:
    """Gradients (dq, dk, dv) and, with sinks, dsinks: second derivatives of the energy along dout [b, s_q, h, d_v].

    Equations (5) to (8). dlse [b, h, s_q] adds the gradient that flows through the returned lse = F(0).
    """
    leaves, out, lse = _leaves_and_results(q, k, v, sinks, spec, keep, keep_weights, distance)
    return torch.autograd.grad(_loss(out, lse, dout, dlse), leaves, materialize_grads=True)


def attention_tangents(
    q, k, v, tangents, *, spec: AttnSpec, keep=None, sinks=None, keep_weights=None, distance=None
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse along those of q, k, v and, with sinks, sinks: equations (9) to (11)."""
    leaves, out, lse = _leaves_and_results(q, k, v, sinks, spec, keep, keep_weights, distance)
    dout, dlse = torch.zeros_like(out).requires_grad_(), torch.zeros_like(lse).requires_grad_()
    along = _directional(_loss(out, lse, dout, dlse), leaves, tangents)
    return torch.autograd.grad(along, (dout, dlse), materialize_grads=True)


def attention_grads_tangents(
    q, k, v, dout, tangents, *, spec: AttnSpec, keep=None, sinks=None, dlse=None, keep_weights=None, distance=None
) -> tuple[Tensor, ...]:
    """The tangents of `attention_grads` along those of q, k, v and sinks: equations (12) to (15)."""
    leaves, out, lse = _leaves_and_results(q, k, v, sinks, spec, keep, keep_weights, distance)
    along = _directional(_loss(out, lse, dout, dlse), leaves, tangents)
    return torch.autograd.grad(along, leaves, materialize_grads=True)


def merge_by_energy(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Equation (4): outs [n, ..., s, h, d] and lses [n, ..., h, s] of n parts -> (out, lse) of the whole.

    A part is F_i(zeta) = lse_i + zeta . out_i to first order; the whole is their log-sum-exp, its gradient the output.
    """
    with torch.enable_grad():
        zeta = torch.zeros_like(outs[0]).requires_grad_()
        parts = lses + (zeta * outs).sum(-1).transpose(-1, -2)
        f = logsumexp(parts.movedim(0, -1))
        (out,) = torch.autograd.grad(f.sum(), zeta)
    return out, f.detach()


def _leaves_and_results(q, k, v, sinks, spec, keep, keep_weights, distance):
    """q, k, v and, where there are some, sinks as leaves, and out and lse of them."""
    leaves = [x.detach().requires_grad_() for x in ((q, k, v) if sinks is None else (q, k, v, sinks))]
    leaf = None if sinks is None else leaves[3]
    return leaves, *_first_derivative(*leaves[:3], spec, keep, leaf, keep_weights, distance, create_graph=True)


def _loss(out, lse, dout, dlse):
    loss = (out * dout).sum()
    return loss if dlse is None else loss + torch.where(lse == NEG_INF, 0.0, lse * dlse).sum()


def _directional(loss, leaves, tangents):
    """The derivative of a loss along the tangents of its leaves."""
    grads = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    return sum((g * t).sum() for g, t in zip(grads, tangents)) + 0 * loss  # it needs a graph where nothing is seen


def _first_derivative(q, k, v, spec, keep, sinks, keep_weights, distance, create_graph):
    """(dF/dzeta, F) at zeta = 0."""
    with torch.enable_grad():
        zeta = q.new_zeros(*q.shape[:3], v.shape[-1]).requires_grad_()
        f = energy(q, k, v, zeta, spec, keep, sinks, keep_weights, distance)
        (out,) = torch.autograd.grad(f.sum(), zeta, create_graph=create_graph)
    return out, f


def scores(q: Tensor, k: Tensor, spec: AttnSpec, keep: Tensor | None = None, distance: Tensor | None = None) -> Tensor:
    """s_a of equation (1): [b, h, s_q, s_k], with softcap and ALiBi applied; hidden pairs are -inf."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, _repeated(k, q)) * spec.softmax_scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, dtype=s.dtype, device=s.device)
        s = s - slopes[:, :, None, None] * (distance[:, None] if distance.dim() == 3 else distance)
    if keep is not None:
        s = s.masked_fill(~(keep[:, None] if keep.dim() == 3 else keep), NEG_INF)
    return s


def visible(q_positions: Tensor, k_positions: Tensor, spec: AttnSpec) -> Tensor:
    """Which keys a query may see: bool [..., s_q, s_k] from integer positions [..., s_q] and [..., s_k]."""
    distance = q_positions[..., :, None] - k_positions[..., None, :]
    keep = torch.ones_like(distance, dtype=torch.bool)
    if spec.left is not None:
        keep &= distance <= spec.left
    if spec.right is not None:
        keep &= distance >= -spec.right
    return keep


def selected(q: Tensor, weights: Tensor, k: Tensor, topk: int, keep: Tensor, scale: float = 1.0) -> Tensor:
    """Which keys index-selected attention sees, equation (16): bool [b, s_q, s_k], the topk visible ones of largest

        I_ia = sum_h w_ih relu(scale * q_ih . k_a),

    of equal ones the earlier. q [b, s_q, h_i, d_i], weights [b, s_q, h_i], k [b, s_k, d_i] in the order of positions;
    keep bool [b, s_q, s_k], the visible pairs.
    """
    index = _index(q, weights, k, scale)
    order = index.masked_fill(~keep, NEG_INF).sort(dim=-1, descending=True, stable=True).indices
    best = torch.zeros_like(keep).scatter_(-1, order[..., :topk], True)
    return best & keep


def index_divergence(
    index_q, index_weights, index_k, q, k, *, spec: AttnSpec, keep: Tensor, scale: float = 1.0, epsilon: float = 0.0
) -> Tensor:
    """How far an index is from the attention that it is to predict, equation (17): [b, s_q], differentiable.

    Arguments as in `selected` and `scores`; keep bool [b, s_q, s_k], with a key for every query. epsilon is added to
    probabilities before their logarithm.
    """
    target = scores(q, k, spec, keep).softmax(-1).mean(1)
    index = _index(index_q, index_weights, index_k, scale).masked_fill(~keep, NEG_INF).softmax(-1)
    target_log, index_log = ((x + epsilon).where(keep, 1.0).log() for x in (target, index))
    return (target * (target_log - index_log)).sum(-1)


def _index(q: Tensor, weights: Tensor, k: Tensor, scale: float) -> Tensor:
    """I_ia of equation (16), [b, s_q, s_k]."""
    return torch.einsum("bqh,bhqk->bqk", weights, (torch.einsum("bqhd,bkd->bhqk", q, k) * scale).clamp(min=0))


def logsumexp(s: Tensor) -> Tensor:
    """log sum exp over the last axis; -inf, with zero gradients, where every term is -inf."""
    if s.shape[-1] == 0:
        return s.sum(-1) + NEG_INF  # stays in the graph
    m = s.detach().amax(-1, keepdim=True)
    m = torch.where(m == NEG_INF, torch.zeros_like(m), m)
    total = torch.exp(s - m).sum(-1)
    empty = total == 0
    return torch.where(empty, NEG_INF, m.squeeze(-1) + torch.log(torch.where(empty, 1.0, total)))


def _repeated(x: Tensor, like: Tensor) -> Tensor:
    """x [b, s, h_kv, d] with every KV head repeated for its query heads, those of `like` [b, s_q, h, d]."""
    return x.repeat_interleave(like.shape[2] // x.shape[2], 2)
