"""Derivatives that attention does not have: who asks for one gets an error instead of wrong numbers.

On one rank the reference backend is torch's own operations, which autograd can differentiate again. To autograd, the
results of other kernels and what other ranks send are constants.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import comm
from ..kernels import Backend


def in_torch(group, backend: Backend) -> bool:
    """Whether torch's own operations compute all of a call."""
    return comm.group_size(group) == 1 and backend.name == "reference"


def check_tangents(**tensors: Tensor | None) -> None:
    """Raise ``ValueError`` for tensors with a tangent: forward-mode differentiation, torch.func.jvp."""
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(
                f"{name} has a tangent, but attention has no forward-mode derivatives: pass {name}.detach(), or use "
                "the backward of tree_attn_func"
            )


def once(grads: list[Tensor | None], sources: tuple[Tensor | None, ...], error: str) -> list[Tensor | None]:
    """The gradients that a backward with create_graph=True returns; ``ValueError(error)`` if they are differentiated.

    sources: what they are functions of, with its graph: autograd looks for what it needs along that.
    torch's once_differentiable only sees the gradients that a backward gets.
    """
    given = [x for x in grads if x is not None]
    guarded = iter(_Once.apply(error, len(given), *given, *sources))
    return [None if x is None else next(guarded) for x in grads]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, error: str, count: int, *tensors: Tensor | None):
        ctx.error = error
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise ValueError(ctx.error)
