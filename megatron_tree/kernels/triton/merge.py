"""Equation (4) of docs/design.md on packed states: [..., E + 1] fp32, out and then lse (`merge.pack_state`)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import LN2, LOG2E
from .host import on_its_device


@triton.jit(do_not_specialize=["num_states", "num_rows", "inner", "outer_stride", "state_stride"])
def merge_states_kernel(
    IN, OUT, num_states, num_rows, inner, outer_stride, state_stride,
    E: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """OUT row r = merge over i of IN[r // inner * outer_stride + i * state_stride + r % inner * (E + 1)], in order."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    valid = r < num_rows
    base = IN + r // inner * outer_stride + r % inner * (E + 1)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    at = base  # goes from state to state: i * state_stride would not fit 32 bits
    for _ in range(num_states):
        top = tl.maximum(top, tl.load(at + E, mask=valid, other=float("-inf")))
        at += state_stride
    top = tl.where(top == float("-inf"), 0.0, top)
    den = tl.zeros((ROWS,), tl.float32)
    num = tl.zeros((ROWS, COLS), tl.float32)
    at = base
    for _ in range(num_states):
        w = tl.math.exp2((tl.load(at + E, mask=valid, other=float("-inf")) - top) * LOG2E)
        den += w
        num += w[:, None] * tl.load(at[:, None] + c[None, :], mask=valid[:, None] & (c < E)[None, :], other=0.0)
        at += state_stride
    safe = tl.where(den == 0.0, 1.0, den)
    lse = tl.where(den == 0.0, float("-inf"), top + tl.math.log2(safe) * LN2)
    to = OUT + r * (E + 1)
    tl.store(to[:, None] + c[None, :], num / safe[:, None], mask=valid[:, None] & (c < E)[None, :])
    tl.store(to + E, lse, mask=valid)


@on_its_device
def merge_packed(packed: Tensor, dim: int = 0) -> Tensor:
    """Merge contiguous fp32 states packed [..., n, ..., E + 1] over `dim` in one launch. States may be empty.

    Returns the merged states [..., E + 1], packed. Sums are in the order of `dim`: the same bits everywhere.
    """
    assert packed.is_contiguous() and packed.dtype == torch.float32
    n, e = packed.shape[dim], packed.shape[-1] - 1
    out = torch.empty((*packed.shape[:dim], *packed.shape[dim + 1 :]), dtype=torch.float32, device=packed.device)
    rows, inner = out.numel() // (e + 1), math.prod(packed.shape[dim + 1 : -1])
    if rows:
        cols = triton.next_power_of_2(e)
        block = max(1, min(16, 2048 // cols))
        merge_states_kernel[(triton.cdiv(rows, block),)](
            IN=packed, OUT=out, num_states=n, num_rows=rows, inner=inner,
            outer_stride=n * inner * (e + 1), state_stride=inner * (e + 1), E=e, COLS=cols, ROWS=block, num_warps=4,
        )  # fmt: skip
    return out
