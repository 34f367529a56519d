"""Operations that follow the device and not the call's backend: Triton's kernel on a GPU, plain torch elsewhere."""

from __future__ import annotations

from torch import Tensor

from .. import merge
from .backends import triton_for


def merge_packed(packed: Tensor) -> Tensor:
    """Equation (4): merge packed states [n, ..., d_v + 1] (fp32 or fp64), in order, to one [..., d_v + 1]."""
    triton = triton_for(packed)
    return triton.merge_packed(packed.contiguous()) if triton else merge.merge_packed(packed)


def attn_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """delta [b, h, s] = rowsum(dout * out) - dlse, fp32 (float64); dout and out [b, s, h, d_v], dlse [b, h, s]."""
    triton = triton_for(out)
    if triton:
        return triton.attn_delta(dout, out, dlse)
    dtype = merge.state_dtype(out.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2)
    return (delta if dlse is None else delta - dlse).contiguous()
