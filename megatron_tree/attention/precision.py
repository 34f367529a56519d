"""Autocast, as torch's scaled_dot_product_attention knows it."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def autocast(*tensors: Tensor | None) -> tuple:
    """A context without autocast, and the tensors in the dtype of the autocast that is enabled for the first one.

    float64 stays, as in torch, and so does what is no tensor of that device. Without autocast nothing changes.
    """
    first = tensors[0]
    device = first.device.type if isinstance(first, Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return _NOTHING, *tensors
    dtype = torch.get_autocast_dtype(device)
    cast = (isinstance(x, Tensor) and x.dtype in _CAST and x.device.type == device for x in tensors)
    tensors = (x.to(dtype) if casts else x for x, casts in zip(tensors, cast, strict=True))
    return torch.autocast(device, enabled=False), *tensors
