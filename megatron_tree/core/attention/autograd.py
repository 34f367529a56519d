"""Tree attention as autograd functions: the forward, the backward, and the tangents of both.

    function         results                                      its backward     its tangents
    TreeAttention    out, lse                       (2), (3)      Gradient         Tangent
    Tangent          the same and their tangents    (9) to (11)   SecondOrder      -
    Gradient         dq, dk, dv, dsinks             (5) to (8)    SecondOrder      SecondOrder
    SecondOrder      the same and their tangents    (12) to (15)  -                -

Second derivatives are symmetric: the tangents of a gradient are the gradient of a tangent. So SecondOrder is the
backward of Tangent and the tangents of Gradient, and, along the gradients that flow in, the backward of Gradient.
Each runs the passes of a plan in a collective call; those with tangents run them with dual tensors (duals.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import comm, kernels
from ..duals import dual, halves
from ..log import say_once
from . import passes
from .call import PlannedAttention
from .cell import Residuals
from .derivatives import (
    NO_THIRD,
    Constant,
    Derivatives,
    Placeholder,
    cut,
    dual_inputs,
    extra_residuals,
    has_tangents,
    input_grads,
    lse_gradient,
    materialize,
    plain,
    save,
    upstream_of,
    with_signature,
    with_zeros,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: PlannedAttention
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of this rank's shard, differentiable. lse may be None unless the call returns it."""
    again, with_lse = call.goes_backward, call.return_lse
    if again or not call.tangents:
        replaced = (q, k, v) if again and call.plan.forward.ulysses_size > 1 and not call.transformed else ()
        return TreeAttention.apply(q, k, v, sinks, call, with_lse, *map(Placeholder.apply, replaced))[:2]
    # Nothing differentiates these inputs at this level again, so one pass gives out and its tangent.
    inputs, tangents = zip(*((x, None) if x is None else forward_ad.unpack_dual(x) for x in (q, k, v, sinks)))
    out, lse, outt, lset, *_ = Tangent.apply(*inputs, *with_zeros(tangents, inputs), Derivatives(call, with_lse, None))
    return forward_ad.make_dual(out, outt), forward_ad.make_dual(lse, lset)


def goes_backward(*inputs: Tensor | None) -> bool:
    """Whether autograd will ask for gradients of any of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


class TreeAttention(torch.autograd.Function):
    """Differentiable attention of this rank's queries over the whole sequence: (out, lse) of its shard.

    Without with_lse, lse may be None. A plan that exchanges heads adds what its backward needs; placeholders, if there
    are any, are then kept instead of this rank's q, k and v.
    """

    @staticmethod
    @with_signature
    def forward(q, k, v, sinks: Tensor | None, call: PlannedAttention, with_lse: bool, *placeholders: Tensor):
        out, lse, residuals = passes.forward(q, k, v, sinks, call, with_lse)
        return plain(out.to(q.dtype)), plain(lse), *extra_residuals(residuals, call.plan.forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, sinks, call, with_lse, *placeholders = inputs
        ctx.derivatives = Derivatives(call, with_lse, comm.call_stamp(call.ranks.group), bool(placeholders))
        save(ctx, (*(placeholders or (q, k, v)), sinks), output, results=2)

    @staticmethod
    @comm.derivative
    def backward(ctx, dout, dlse, *_):
        inputs, results, residuals = cut(ctx.saved_tensors, 4, 2)
        return input_grads(ctx, *gradient(inputs, (dout, dlse), results, residuals, ctx.derivatives))

    @staticmethod
    @comm.derivative
    def jvp(ctx, *tangents):
        inputs, (_, lse), residuals = cut(ctx.saved_tensors, 4, 2)
        within = dataclasses.replace(ctx.derivatives, stamp=None)
        _, _, outt, lset, *_ = Tangent.apply(*inputs, *with_zeros(tangents, inputs), within)
        return outt, None if lse is None else lset, *(None for _ in residuals)


class Tangent(torch.autograd.Function):
    """out and lse, and their tangents along those of q, k, v and sinks."""

    @staticmethod
    @with_signature
    def forward(q, k, v, sinks, qt, kt, vt, sinkst, derivatives: Derivatives):
        call = derivatives.call.for_duals
        with derivatives.collective_call("the tangents of tree attention", q.device, q=qt, k=kt, v=vt):
            duals = dual_inputs((q, k, v, sinks), (qt, kt, vt, sinkst))
            state, lse, residuals = passes.forward(*duals, call, with_lse=True)
        out, r, mu = state.split((v.shape[-1], v.shape[-1], 1), -1)
        outt = torch.addcmul(r, mu, out, value=-1)  # (11)
        lset = mu[..., 0].transpose(1, 2).contiguous()
        return out.to(q.dtype), lse, outt.to(q.dtype), lset, *extra_residuals(residuals, call.plan.forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *inputs, derivatives = inputs
        ctx.derivatives = Derivatives(derivatives.call, True, comm.call_stamp(derivatives.call.ranks.group))
        save(ctx, inputs, output, results=4)

    @staticmethod
    @comm.derivative
    def backward(ctx, dout, dlse, doutt, dlset, *_):
        inputs, tangents, results, result_tangents, residuals = cut(ctx.saved_tensors, 4, 4, 2, 2)
        if doutt is None and dlset is None:
            residuals = residuals and [*(halves(x)[0] for x in residuals[:3]), residuals[3][..., 0]]
            return input_grads(ctx, *gradient(inputs, (dout, dlse), results, residuals, ctx.derivatives.with_dual_plan))
        upstream = (doutt, dlset, dout, dlse)
        saved = (*results, *result_tangents, *residuals)
        both = second_order(inputs, tangents, upstream, saved, ctx.derivatives)
        return *both[4:], *both[:4], None

    @staticmethod
    def jvp(ctx, *_):
        raise ValueError(_NO_TANGENTS_OF_TANGENTS)


class Gradient(torch.autograd.Function):
    """dq, dk, dv and dsinks along dout and dlse, from the forward's results, whose tangents are of use for its own."""

    @staticmethod
    @with_signature
    def forward(q, k, v, sinks, dout, dlse, derivatives: Derivatives, out, lse, outt, lset, *residuals):
        call, residuals = derivatives.call, Residuals(*residuals) if residuals else Residuals(q, k, v, lse)
        dout, dlse = upstream_of(call, out, dout, dlse)
        with derivatives.collective_call("the backward of tree attention", q.device, dout=dout):
            exchanges = call.plan.backward.ulysses_size > 1
            if dlse is not None or (derivatives.with_lse and exchanges):  # another rank's dlse may be in delta
                needs = dict(flowing_lse=True, selects=call.selected is not None)
                backend = kernels.choose(*residuals[:3], call.spec, call.config.backend, **needs)
                call = dataclasses.replace(call, backend=backend)
            delta = kernels.attn_delta(dout, out, lse_gradient(dlse, lse))
            *grads, dsinks = passes.backward(dout, delta, residuals, sinks, call)  # d2F/dqkv dzeta: (5) to (7)
        return *(plain(x.to(out.dtype)) for x in grads), dsinks

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.derivatives = inputs[6]
        tensors = (*inputs[:6], *inputs[7:])
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @comm.derivative
    def backward(ctx, *upstream):
        inputs, (dout, dlse), _, residuals = cut(ctx.saved_tensors, 4, 2, 4)
        return input_grads(
            ctx, *_along(upstream, materialize(inputs, residuals, ctx.derivatives), dout, dlse, ctx.derivatives)
        )

    @staticmethod
    @comm.derivative
    def jvp(ctx, *tangents):
        inputs, (dout, dlse), (out, lse, outt, lset), residuals = cut(ctx.saved_tensors, 4, 2, 4)
        tangents, (doutt, dlset) = tangents[:4], tangents[4:6]
        if all(x is None for x in tangents):
            return gradient(inputs, (doutt, dlset), (out, lse), residuals, ctx.derivatives)
        tangents, residuals = with_zeros(tangents, inputs), ()
        if lset is None or ctx.derivatives.call.for_duals.plan.forward.ulysses_size > 1:
            out, lse, outt, lset, *residuals = Tangent.apply(*inputs, *tangents, ctx.derivatives)
        upstream, saved = (dout, dlse, doutt, dlset), (out, lse, outt, lset, *residuals)
        return second_order(inputs, tangents, upstream, saved, ctx.derivatives)[4:]


class SecondOrder(torch.autograd.Function):
    """dq, dk, dv and dsinks along dout and dlse, and their tangents along those of all these: four and four."""

    @staticmethod
    @with_signature
    def forward(q, k, v, sinks, qt, kt, vt, sinkst, dout, dlse, doutt, dlset, derivatives: Derivatives, *saved):
        (out, lse, outt, lset), residuals = saved[:4], saved[4:]
        call, (q2, k2, v2, sinks2) = derivatives.call.for_duals, dual_inputs((q, k, v, sinks), (qt, kt, vt, sinkst))
        residuals = Residuals(*residuals) if residuals else Residuals(q2, k2, v2, torch.stack((lse, lset), -1))
        dout, dlse = upstream_of(call, out, dout, dlse)
        doutt, dlset = upstream_of(call, out, doutt, dlset)
        with derivatives.collective_call("the second derivatives of tree attention", q.device, dout=dout):
            delta = kernels.attn_delta(dout, out, lse_gradient(dlse, lse))
            kappa = kernels.attn_delta(doutt, out, lse_gradient(dlset, lse)) + kernels.attn_delta(dout, outt)
            statistics = torch.stack((delta, kappa), -1)
            *grads, dsinks = passes.backward(dual(dout, doutt), statistics, residuals, sinks2, call)
        grads = [halves(x.to(out.dtype)) for x in grads]
        grads.append((None, None) if dsinks is None else dsinks.unbind(-1))
        return *(plain(x) for x, _ in grads), *(plain(x) for _, x in grads)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.derivatives = inputs[12]
        ctx.save_for_backward(*inputs[:4], *inputs[8:10])
        ctx.save_for_forward(*inputs[:8])
        ctx.set_materialize_grads(False)

    @staticmethod
    @comm.derivative
    def backward(ctx, *upstream):
        if any(x is not None for x in upstream[:4]):
            raise ValueError(NO_THIRD)
        inputs, (dout, dlse), _ = cut(ctx.saved_tensors, 4, 2)
        *of_tangents, doutt, dlset = _along(upstream[4:], inputs, dout, dlse, ctx.derivatives)
        return input_grads(ctx, *(None,) * 4, *of_tangents, None, None, doutt, dlset)

    @staticmethod
    def jvp(ctx, *_):
        # a plain backward within forward_ad.dual_level comes here, too, where nobody asks for these
        say_once(f"{NO_THIRD}: the tangents of second derivatives are NaN")
        return tuple(None if x is None else torch.full_like(x, float("nan")) for x in ctx.saved_tensors)


def gradient(inputs: Sequence, upstream: Sequence, results: Sequence, residuals: Sequence, derivatives: Derivatives):
    """The results of Gradient. The forward's results are constants here: they don't ask for its backward again."""
    if not torch.is_grad_enabled() and not has_tangents(*inputs, *upstream):
        return Gradient.forward(*inputs, *upstream, derivatives, *results, None, None, *residuals)
    tangents = (None if x is None else forward_ad.unpack_dual(x).tangent for x in results)
    saved = (None if x is None else x.detach() for x in (*results, *tangents, *residuals))
    return Gradient.apply(*inputs, *upstream, derivatives, *saved)


def second_order(inputs: Sequence, tangents: Sequence, upstream: Sequence, saved: Sequence, derivatives: Derivatives):
    """The results of SecondOrder, which is linear in the tangents and in those of dout and dlse: nothing but these gets
    a gradient."""
    fixed = (*inputs, *upstream[:2])
    if torch.is_grad_enabled():
        fixed = [None if x is None else Constant.apply(x) for x in fixed]
    saved = (x.detach() for x in saved)
    return SecondOrder.apply(*fixed[:4], *tangents, *fixed[4:], *upstream[2:], derivatives, *saved)


def _along(tangents: Sequence, inputs: Sequence, dout: Tensor | None, dlse: Tensor | None, derivatives: Derivatives):
    """The gradients of <tangents, (dq, dk, dv, dsinks)> by q, k, v, sinks, dout and dlse."""
    tangents = with_zeros(tangents, inputs)
    out, lse, outt, lset, *residuals = Tangent.apply(*inputs, *tangents, derivatives)
    saved = (out, lse, outt, lset, *residuals)
    return *second_order(inputs, tangents, (dout, dlse, None, None), saved, derivatives)[4:], outt, lset


_NO_TANGENTS_OF_TANGENTS = (
    "attention has no tangents of tangents: nest torch.func.grad in torch.func.jvp or the other way round, not two jvps"
)
