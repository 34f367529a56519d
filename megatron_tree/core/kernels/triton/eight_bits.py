"""Tokens into pages in 8 bits, with a scale for each token and head, in one launch: `cache.quantize` and copies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs, host


@triton.jit
def _to_integer(x):
    """The nearest integer of |x| < 2^22, of two the even one."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def _to_e4m3(x):
    """The nearest number with 3 bits behind its first one, or below 2^-6 the nearest multiple of 2^-9, of two the even
    one: a conversion to fp8 then has nothing to round."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _store(X, PAGES, SCALES, n, h, page, at, x_strides, strides, scale_strides, LARGEST, INTEGER, E, COLS):
    c = tl.arange(0, COLS)
    x = tl.load(X + n * x_strides[0] + h * x_strides[1] + c, mask=c < E, other=0.0).to(tl.float32)
    bad = tl.sum(x * 0.0, 0)  # NaN if anything is not finite: so is the scale then
    scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-30), LARGEST) + bad
    scaled = tl.math.div_rn(x, tl.broadcast_to(scale, (COLS,)))
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    to = PAGES + page * strides[0] + at * strides[1] + h * strides[2]
    scaled = _to_integer(scaled) if INTEGER else _to_e4m3(scaled)
    tl.store(to + c, scaled.to(PAGES.dtype.element_ty), mask=c < E)
    tl.store(SCALES + page * scale_strides[0] + at * scale_strides[1] + h * scale_strides[2], scale)


@triton.jit
def write_eight_bits_kernel(
    SLOTS, K, V, K_PAGES, V_PAGES, K_SCALES, V_SCALES, k_strides, v_strides, k_page_strides, v_page_strides,
    k_scale_strides, v_scale_strides, PAGE: tl.constexpr, LARGEST: tl.constexpr, INTEGER: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, D_COLS: tl.constexpr, E_COLS: tl.constexpr,
):  # fmt: skip
    """One head of one token: K [n, h, D] and V [n, h, E] to slot SLOTS[n], page * PAGE + offset."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(SLOTS + n)
    page, at = slot // PAGE, slot % PAGE
    _store(
        K, K_PAGES, K_SCALES, n, h, page, at, k_strides, k_page_strides, k_scale_strides, LARGEST, INTEGER, D, D_COLS
    )
    _store(
        V, V_PAGES, V_SCALES, n, h, page, at, v_strides, v_page_strides, v_scale_strides, LARGEST, INTEGER, E, E_COLS
    )


@host.on_its_device
def write_eight_bits(slots: Tensor, k: Tensor, v: Tensor, pages, scales, largest: float) -> None:
    """Put tokens k [n, h, d] and v [n, h, e] into slots, int64 [n], of two tensors of pages [pages, page_size, h, d] in
    int8 or fp8, with scales fp32 [pages, page_size, h]. largest: the format's largest number."""
    k, v = host.unit_last_stride(k), host.unit_last_stride(v)
    if k.numel() == 0:
        return
    (n, h, d), e = k.shape, v.shape[-1]
    write_eight_bits_kernel[(n, h)](
        SLOTS=slots.contiguous(), K=k, V=v, K_PAGES=pages[0], V_PAGES=pages[1], K_SCALES=scales[0], V_SCALES=scales[1],
        k_strides=k.stride()[:2], v_strides=v.stride()[:2], k_page_strides=pages[0].stride()[:3],
        v_page_strides=pages[1].stride()[:3], k_scale_strides=scales[0].stride(), v_scale_strides=scales[1].stride(),
        PAGE=pages[0].shape[1], LARGEST=largest, INTEGER=pages[0].dtype == torch.int8,
        D=d, E=e, D_COLS=configs.power_of_2(d), E_COLS=configs.power_of_2(e), num_warps=1,
    )  # fmt: skip
