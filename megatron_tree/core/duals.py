"""Dual tensors: values and their tangents side by side on the last axis, [..., 2 d] for [..., d].

Forward-mode derivatives travel, are gathered and are cut into heads like any other tensor of that shape, so the
schedules of attention need not know of them: only the kernels do (`Backend.attn_jvp`, `Backend.attn_bwd_jvp`).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
