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

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import comm, kernels
from ..duals import dual, halves, has_tangents, only_backward
from ..kernels import Backend
from ..layout import sequences_of
from ..log import say_once
from ..plan import PassPlan
from . import passes
from .call import PlannedAttention
from .cell import Residuals
from .passes import restore_inputs
from .validate import check_finite_shares


def in_torch(ranks: comm.Ranks, backend: Backend) -> bool:
    """Whether torch's own operations compute all of a call."""
    return ranks.size == 1 and backend.name == "reference"


@dataclasses.dataclass(frozen=True)
class Derivatives:
    """What the derivatives of a forward know of it."""

    call: PlannedAttention
    with_lse: bool
    stamp: int | None
    """Of the forward's collective call; None within that call."""
    of_placeholders: bool = False
    """Whether q, k and v are `Placeholder`s."""

    @property
    def with_dual_plan(self) -> Derivatives:
        """The same of the forward that was part of one of dual tensors."""
        return dataclasses.replace(self, call=dataclasses.replace(self.call, plan=self.call.for_duals.plan))

    @contextlib.contextmanager
    def collective_call(self, name: str, device: torch.device, **checked: Tensor | None) -> Iterator[None]:
        """One call of all ranks, without autocast. checked: what check="finite" looks at."""
        call = self.call
        with torch.autocast(device.type, enabled=False):
            if self.stamp is None:
                yield
                return
            with call.ranks.call(name) as collective:
                if call.config.check == "finite":
                    check_finite_shares(call.ranks, call.queries, call.keys, **checked)
                    collective.agree()
                else:
                    collective.start(self.stamp)
                yield


def with_signature(function: Callable) -> Callable:
    """The function with its signature at hand, for which torch asks in every call of an autograd function."""
    function.__signature__ = inspect.signature(function)
    return function


NO_THIRD = "attention has no third derivatives"


class Constant(torch.autograd.Function):
    """x, by which what follows can't be differentiated."""

    @staticmethod
    @with_signature
    def forward(x: Tensor) -> Tensor:
        return plain(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, _):
        raise ValueError(NO_THIRD)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent


class Placeholder(torch.autograd.Function):
    """A tensor of one element in the place of x, whose gradients become x's. It can't have tangents."""

    @staticmethod
    @with_signature
    def forward(x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class Materialize(torch.autograd.Function):
    """The values of the placeholders of q, k and v: those that an exchange of heads has left here return."""

    @staticmethod
    @with_signature
    def forward(q: Tensor, k: Tensor, v: Tensor, derivatives: Derivatives, *residuals: Tensor):
        with derivatives.collective_call("the inputs of tree attention", q.device):
            return tuple(plain(x) for x in restore_inputs(Residuals(*residuals), derivatives.call))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.num_inputs = len(inputs)

    @staticmethod
    def backward(ctx, *grads):
        return *grads, *(None,) * (ctx.num_inputs - 3)


def materialize(inputs: Sequence, residuals: Sequence, derivatives: Derivatives) -> Sequence:
    """q, k, v and sinks with values in place of placeholders."""
    return (
        (*Materialize.apply(*inputs[:3], derivatives, *residuals), inputs[3]) if derivatives.of_placeholders else inputs
    )


def extra_residuals(residuals: Residuals, plan: PassPlan) -> Residuals | tuple[()]:
    """What a backward needs beyond a forward's inputs and results: these after an exchange of heads."""
    return residuals if plan.ulysses_size > 1 else ()


def plain(x: Tensor | None) -> Tensor | None:
    """x as a tensor that is no view: torch wants the tangent of a view to have its strides."""
    return None if x is None else x.data


def input_grads(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """What a backward returns: the gradients of the first inputs, as far as they have one."""
    missing = [None] * (len(ctx.needs_input_grad) - len(grads))
    return tuple(x if needs else None for x, needs in zip((*grads, *missing), ctx.needs_input_grad))


def save(ctx, inputs: Sequence, output: Sequence, results: int) -> None:
    if len(output) > results:
        ctx.mark_non_differentiable(*output[results:])
    ctx.save_for_backward(*inputs, *output)
    if not only_backward():
        ctx.save_for_forward(*inputs, *output)
    ctx.set_materialize_grads(False)  # every rank takes part in a backward's collectives, even without a gradient


def cut(tensors: Sequence, *lengths: int) -> list[Sequence]:
    """Parts of these lengths, and the rest."""
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [*(tensors[i:j] for i, j in itertools.pairwise(ends)), tensors[ends[-1] :]]


def with_zeros(tangents: Sequence, inputs: Sequence) -> list[Tensor | None]:
    """The tangents of inputs, zeros where there is none."""
    return [torch.zeros_like(x) if t is None and x is not None else t for t, x in zip(tangents, inputs)]


def dual_inputs(inputs: Sequence, tangents: Sequence) -> list[Tensor | None]:
    """Dual tensors of q, k, v, and sinks [h, 2]."""
    (*qkv, sinks), (*qkvt, sinkst) = inputs, tangents
    return [*map(dual, qkv, qkvt), None if sinks is None else torch.stack((sinks, sinkst), -1)]


def upstream_of(
    call: PlannedAttention, out: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dout, zeros where there is none, and dlse; 0 in rows of padding, whose gradients may be NaN."""
    dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
    if call.num_rows < out.shape[1]:
        padding = sequences_of(call.local, out.shape[1]).to(out.device) < 0
        dout = dout.masked_fill(padding[:, None, None], 0)
        dlse = None if dlse is None else dlse.masked_fill(padding, 0)
    return dout, dlse


def lse_gradient(dlse: Tensor | None, lse: Tensor) -> Tensor | None:
    """The gradient that flows through lse: none where nothing is seen."""
    return None if dlse is None else torch.where(lse == float("-inf"), 0.0, dlse)


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: PlannedAttention
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of this rank's shard, differentiable. lse may be None unless the call returns it."""
    if call.goes_backward or not call.tangents:
        exchanges = call.goes_backward and call.plan.forward.ulysses_size > 1
        placeholders = map(Placeholder.apply, (q, k, v) if exchanges and not call.transformed else ())
        return TreeAttention.apply(q, k, v, sinks, call, call.return_lse, *placeholders)[:2]
    # Nothing differentiates these inputs at this level again, so one pass gives out and its tangent.
    inputs, tangents = zip(*((x, None) if x is None else forward_ad.unpack_dual(x) for x in (q, k, v, sinks)))
    derivatives = Derivatives(call, call.return_lse, None)
    out, lse, outt, lset, *_ = Tangent.apply(*inputs, *with_zeros(tangents, inputs), derivatives)
    return forward_ad.make_dual(out, outt), forward_ad.make_dual(lse, lset)


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
    """dq, dk, dv and dsinks along dout and dlse, and their tangents along all tangents: four and four."""

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
