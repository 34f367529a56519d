"""Transforms of torch.func, through which no message goes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor

_DIFFERENTIATES = {TransformType.Grad, TransformType.Jvp}


def check_transforms(name: str, *tensors: Tensor | None, differentiable: bool) -> None:
    """Raise ``ValueError`` within transforms of torch.func in which this function does not run.

    tensors: what may be a batch of autograd's is_grads_batched=True. differentiable: whether there are derivatives.
    """
    found = set()
    if torch._C._are_functorch_transforms_active():
        found = {x.key() for x in get_interpreter_stack()} - (_DIFFERENTIATES if differentiable else set())
    if any(x is not None and is_legacy_batchedtensor(x) for x in tensors):
        found = {TransformType.Vmap}
    if found:
        names = ", ".join(sorted(x.name.lower() for x in found))
        raise ValueError(
            f"{name} does not run within {names} of torch.func (jacrev, jacfwd, hessian and is_grads_batched=True use "
            "vmap): call it outside; tree_attn_func and the functions of recurrent layers have grad, vjp and jvp"
        )
