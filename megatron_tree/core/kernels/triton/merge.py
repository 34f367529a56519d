"""Equation (4) of docs/design.md on packed states: [..., E + 1] fp32, out and then lse (`merge.pack_state`)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs, host
from .common import LN2, LOG2E


@triton.jit(do_not_specialize=["num_states", "inner", "outer_stride", "state_stride"])
def merge_states_kernel(
    IN, OUT, num_states, inner, outer_stride, state_stride, E: tl.constexpr, COLS: tl.constexpr, STATES: tl.constexpr
):  # fmt: skip
    """OUT row r = merge over i of IN[r // inner * outer_stride + i * state_stride + r % inner * (E + 1)].

    A program takes one row, STATES states at a time, whose loads don't wait for each other. STATES depends on E
    alone: so empty states at the end don't change the bits.
    """
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLS)
    base = IN + r // inner * outer_stride + r % inner * (E + 1)
    top = float("-inf")
    den = 0.0
    num = tl.zeros((COLS,), tl.float32)
    for first in range(0, num_states, STATES):
        i = first + tl.arange(0, STATES)
        at = base + i.to(tl.int64) * state_stride
        lse = tl.load(at + E, mask=i < num_states, other=float("-inf"))
        out = tl.load(at[:, None] + c[None, :], mask=(i < num_states)[:, None] & (c < E)[None, :], other=0.0)
        new = tl.maximum(top, tl.max(lse, 0))
        level = tl.where(new == float("-inf"), 0.0, new)
        w = tl.math.exp2((lse - level) * LOG2E)
        shrink = tl.math.exp2((top - level) * LOG2E)
        den = den * shrink + tl.sum(w, 0)
        num = num * shrink + tl.sum(w[:, None] * out, 0)
        top = new
    safe = tl.where(den == 0.0, 1.0, den)
    lse = tl.where(den == 0.0, float("-inf"), top + tl.math.log2(safe) * LN2)
    to = OUT + r * (E + 1)
    tl.store(to + c, num / safe, mask=c < E)
    tl.store(to + E, lse)


def merge_states(packed: Tensor, dim: int = 0) -> Tensor:
    """Merge contiguous fp32 states packed [..., n, ..., E + 1] over `dim` in one launch, on the current GPU, which must
    be theirs: `merge_packed` sees to it. States may be empty.

    Returns the merged states [..., E + 1], packed. Sums have one order: the same bits everywhere, and the same
    with more empty states at the end.
    """
    assert packed.is_contiguous() and packed.dtype == torch.float32
    n, e = packed.shape[dim], packed.shape[-1] - 1
    out = torch.empty((*packed.shape[:dim], *packed.shape[dim + 1 :]), dtype=torch.float32, device=packed.device)
    rows, inner = out.numel() // (e + 1), math.prod(packed.shape[dim + 1 : -1])
    if rows:
        cols = configs.power_of_2(e)
        merge_states_kernel[(rows,)](
            IN=packed, OUT=out, num_states=n, inner=inner, outer_stride=n * inner * (e + 1),
            state_stride=inner * (e + 1), E=e, COLS=cols, STATES=max(1, min(32, 8192 // cols)), num_warps=4,
        )  # fmt: skip
    return out


merge_packed = host.on_its_device(merge_states)
