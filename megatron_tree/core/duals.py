"""Dual tensors: values and their tangents side by side on the last axis, [..., 2 d] for [..., d].

Forward-mode derivatives travel, are gathered and are cut into heads like any other tensor of that shape, so the
schedules of attention need not know of them: only the kernels do (`Backend.attn_jvp`, `Backend.attn_bwd_jvp`).

And what torch is about to differentiate: `has_tangents`, `only_backward`, `goes_backward`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def dual(value: Tensor, tangent: Tensor) -> Tensor:
    """[..., 2 d] of a value and its tangent, [..., d] each."""
    return torch.cat((value, tangent), -1)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a dual tensor's value and tangent."""
    return x.chunk(2, -1)


def swapped(x: Tensor) -> Tensor:
    """The tangent first: this times a dual tensor, summed over the last axis, is the tangent of the product of both."""
    value, tangent = halves(x)
    return torch.cat((tangent, value), -1)


def dual_product(sums: str, x: Tensor, tangent: Tensor, y: Tensor) -> Tensor:
    """The einsum `sums` of x, which has this tangent, and a dual tensor y, as a dual tensor."""
    product, (value, _) = torch.einsum(sums, x, y), halves(y)
    halves(product)[1].add_(torch.einsum(sums, tangent, value))
    return product


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


def goes_backward(*inputs: Tensor | None) -> bool:
    """Whether autograd will ask for gradients of any of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
