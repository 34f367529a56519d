"""Equation (4) of docs/design.md in one launch: of packed states, [..., E + WORDS] with out and then lse
(`merge.pack_state`), and of one state into another."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs, host
from .common import LN2, LOG2E


@triton.jit
def _with_states(top, den, num, lse, out):
    """The maximum, denominator and numerators [COLS] so far, with more states: lse [n], out [n, COLS]."""
    new = tl.maximum(top, tl.max(lse, 0))
    level = tl.where(new == float("-inf"), 0.0, new)
    w = tl.math.exp2((lse - level) * LOG2E)
    shrink = tl.math.exp2((top - level) * LOG2E)
    return new, den * shrink + tl.sum(w, 0), num * shrink + tl.sum(w[:, None] * out, 0)


@triton.jit
def _store_state(TO, c, top, den, num, E: tl.constexpr):
    safe = tl.where(den == 0.0, 1.0, den)
    tl.store(TO + c, num / safe, mask=c < E)
    tl.store(TO + E, tl.where(den == 0.0, float("-inf"), top + tl.math.log2(safe) * LN2))


@triton.jit(do_not_specialize=["num_states", "inner", "outer_stride", "state_stride"])
def merge_states_kernel(
    IN, BITS, OUT, num_states, inner, outer_stride, state_stride,
    E: tl.constexpr, WORDS: tl.constexpr, COLS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """OUT row r = merge over i of IN[r // inner * outer_stride + i * state_stride + r % inner * (E + WORDS)].

    BITS: the same memory, as int16 where lse is two words. A program takes one row, STATES at a time, whose loads don't
    wait for each other; STATES depends on E alone, so empty states at the end don't change the bits.
    """
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLS)
    base = r // inner * outer_stride + r % inner * (E + WORDS)
    top = float("-inf")
    den = 0.0
    num = tl.zeros((COLS,), tl.float32)
    for first in range(0, num_states, STATES):
        i = first + tl.arange(0, STATES)
        at = base + i.to(tl.int64) * state_stride
        if WORDS == 2:
            low = tl.load(BITS + at + E, mask=i < num_states, other=0).to(tl.int32)
            high = tl.load(BITS + at + E + 1, mask=i < num_states, other=0).to(tl.int32)
            lse = tl.where(i < num_states, ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True), float("-inf"))
        else:
            lse = tl.load(BITS + at + E, mask=i < num_states, other=float("-inf"))
        mask = (i < num_states)[:, None] & (c < E)[None, :]
        out = tl.load(IN + at[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
        top, den, num = _with_states(top, den, num, lse, out)
    _store_state(OUT + r * (E + 1), c, top, den, num, E)


def merge_states(packed: Tensor, dim: int = 0) -> Tensor:
    """Merge contiguous states packed [..., n, ..., E + 1] (in half precision E + 2, lse's two words) over `dim` in one
    launch, on the current GPU, which must be theirs: `merge_packed` sees to it. States may be empty.

    Returns the merged states [..., E + 1], packed in fp32. Sums have one order: the same bits everywhere, and the same
    with more empty states at the end.
    """
    words = 4 // packed.element_size()
    assert packed.is_contiguous() and words in (1, 2)
    n, e = packed.shape[dim], packed.shape[-1] - words
    shape = (*packed.shape[:dim], *packed.shape[dim + 1 : -1], e + 1)
    out = torch.empty(shape, dtype=torch.float32, device=packed.device)
    rows, inner = out.numel() // (e + 1), math.prod(packed.shape[dim + 1 : -1])
    if rows:
        cols = configs.power_of_2(e)
        merge_states_kernel[(rows,)](
            IN=packed, BITS=packed.view(torch.int16) if words == 2 else packed, OUT=out, num_states=n, inner=inner,
            outer_stride=n * inner * (e + words), state_stride=inner * (e + words), E=e, WORDS=words, COLS=cols,
            STATES=_states_at_once(cols), num_warps=4,
        )  # fmt: skip
    return out


merge_packed = host.on_its_device(merge_states)


def _states_at_once(cols: int) -> int:
    return max(1, min(32, 8192 // cols))


@triton.jit(do_not_specialize=["num_rows"])
def merge_into_kernel(
    ACC, ACC_LSE, OUT, LSE, num_rows, acc_strides, acc_lse_strides, out_strides, lse_strides,
    E: tl.constexpr, COLS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """M rows of a head of ACC [b, s, h, E] and ACC_LSE [b, h, s] = their merge with OUT and LSE."""
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    c, seen = tl.arange(0, COLS), i < num_rows
    to_lse = ACC_LSE + b * acc_lse_strides[0] + h * acc_lse_strides[1] + i * acc_lse_strides[2]
    ours = tl.load(to_lse, mask=seen, other=float("-inf"))
    at = LSE + b * lse_strides[0] + h * lse_strides[1] + i * lse_strides[2]
    other = tl.load(at, mask=seen, other=float("-inf")).to(tl.float32)
    top = tl.maximum(ours, other)
    level = tl.where(top == float("-inf"), 0.0, top)
    of_ours, of_other = tl.math.exp2((ours - level) * LOG2E), tl.math.exp2((other - level) * LOG2E)
    total = of_ours + of_other
    safe = tl.where(total == 0.0, 1.0, total)
    mask = seen[:, None] & (c < E)[None, :]
    to = ACC + b * acc_strides[0] + i[:, None] * acc_strides[1] + h * acc_strides[2] + c[None, :]
    at = OUT + b * out_strides[0] + i[:, None] * out_strides[1] + h * out_strides[2] + c[None, :]
    acc = tl.load(to, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    acc = acc * (of_ours / safe)[:, None] + out * (of_other / safe)[:, None]
    tl.store(to, acc.to(ACC.dtype.element_ty), mask=mask)
    tl.store(to_lse, tl.where(total == 0.0, float("-inf"), top + tl.math.log2(safe) * LN2), mask=seen)


@host.on_its_device
def merge_into(acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """`merge.merge_into` in one launch: acc_out and out [b, s, h, E] of any dtype but float64, lse [b, h, s] fp32."""
    b, s, h, e = acc_out.shape
    out, cols = host.unit_last_stride(out), configs.power_of_2(e)
    assert acc_lse.dtype == torch.float32 and (acc_out.stride(-1) == 1 or e == 1)
    if 0 in acc_out.shape:
        return
    m = max(1, min(16, 8192 // cols))
    merge_into_kernel[(-(-s // m), h, b)](
        ACC=acc_out, ACC_LSE=acc_lse, OUT=out, LSE=lse, num_rows=s, acc_strides=acc_out.stride()[:3],
        acc_lse_strides=acc_lse.stride(), out_strides=out.stride()[:3], lse_strides=lse.stride(),
        E=e, COLS=cols, M=m, num_warps=4,
    )  # fmt: skip
