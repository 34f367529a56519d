"""What the functions of autograd.py share, and errors in place of derivatives that attention does not have."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import comm
from ..duals import dual
from ..kernels import Backend
from ..layout import sequences_of
from ..plan import PassPlan
from .call import PlannedAttention
from .cell import Residuals
from .ulysses import restore_inputs
from .validate import check_finite_shares


def in_torch(ranks: comm.Ranks, backend: Backend) -> bool:
    """Whether torch's own operations compute all of a call."""
    return ranks.size == 1 and backend.name == "reference"


def has_tangents(*tensors: Tensor | None) -> bool:
    """Whether any of them is differentiated in forward mode."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def only_backward() -> bool:
    """Whether a backward is all that can follow here: no forward mode and no transform of torch.func is under way."""
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


def check_tangents(**tensors: Tensor | None) -> None:
    """Raise ``ValueError`` for tensors with a tangent, in functions over a cache: they have no forward mode."""
    for name, x in tensors.items():
        if has_tangents(x):
            raise ValueError(
                f"{name} has a tangent, but decoding and prefill have no forward-mode derivatives: pass "
                f"{name}.detach(), or use tree_attn_func, which has them"
            )


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
    """A tensor of one element in the place of x, whose gradients are those of x. It can't have tangents."""

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
