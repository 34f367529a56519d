"""Libraries that time_case shows beside our kernels where they are installed, by their own functions: FlashAttention 3,
FlashInfer and FlashMLA. Written by their documentation; none of this has run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .kernel_cases import KernelCase

BLOCK = 64  # tokens of FlashMLA's pages


def others(case: KernelCase, given: list[Tensor]) -> dict[str, Callable[[], object]]:
    """{name: call} for the inputs q, k, v, dout; what a call returns is as torch's: [b, heads, s, d]."""
    found = {"FlashAttention 3": ("flash_attn_interface", _flash)}
    if case.kind == "decode" and not case.eight_bits and not case.cache.startswith("paged"):
        found |= {"FlashMLA": ("flash_mla", _mla)} if case.cache == "latent" else {}
        found |= {"FlashInfer": ("flashinfer", _flashinfer)} if case.b == 1 and not case.cache else {}
    elif case.kind == "decode" or case.mask == "zigzag":
        return {}
    calls = {name: make(case, importlib.import_module(module), *given)
             for name, (module, make) in found.items() if importlib.util.find_spec(module)}  # fmt: skip
    return {name: call for name, call in calls.items() if call is not None}


def _flash(case: KernelCase, library, q, k, v, dout):
    """Dao et al., hopper/flash_attn_interface.py."""
    scale = dict(softmax_scale=case.spec.softmax_scale)
    if case.kind == "decode":
        if case.cache:
            return None
        return lambda: library.flash_attn_with_kvcache(q, k, v, **scale).transpose(1, 2)
    leaves = [x.detach().requires_grad_(case.kind == "bwd") for x in (q, k, v)]
    if case.mask == "packed":
        segments = case.segments["q_segments"]
        longest = max(x.length for x in segments)
        ends = torch.tensor([0, *(x.row + x.length for x in segments)], dtype=torch.int32, device=q.device)
        bounds = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest)
        attend = functools.partial(library.flash_attn_varlen_func, *(x[0] for x in leaves), **bounds)
    else:
        window = (-1, -1) if case.spec.left is None else (case.spec.left, 0)
        attend = functools.partial(library.flash_attn_func, *leaves, window_size=window)

    def forward() -> Tensor:
        out = attend(causal=True, **scale)
        out = out[0] if isinstance(out, tuple) else out
        return out.view(*q.shape[:3], -1)

    if case.kind == "fwd":
        return lambda: forward().transpose(1, 2)
    once = functools.cache(forward)
    return lambda: tuple(x.transpose(1, 2) for x in torch.autograd.grad(once(), leaves, dout, retain_graph=True))


def _flashinfer(case: KernelCase, library, q, k, v, _):
    """Ye et al., flashinfer.decode: q [h, d], keys [s, h_kv, d]."""
    attend = functools.partial(library.single_decode_with_kv_cache, kv_layout="NHD", sm_scale=case.spec.softmax_scale)
    return lambda: attend(q[0, 0], k[0], v[0])[None, :, None]


def _mla(case: KernelCase, library, q, k, v, _):
    """DeepSeek, flash_mla: pages [n, 64, 1, 576], whose first 512 columns are the values."""
    pages = k.reshape(-1, BLOCK, 1, case.d)
    table = torch.arange(len(pages), dtype=torch.int32, device=q.device).view(case.b, -1)
    lengths = torch.full((case.b,), case.s, dtype=torch.int32, device=q.device)
    plan, num_splits = library.get_mla_metadata(lengths, case.h // case.h_kv, case.h_kv)
    scale = case.spec.softmax_scale
    call = functools.partial(
        library.flash_mla_with_kvcache, q, pages, table, lengths, case.d_v, plan, num_splits, scale
    )
    return lambda: call(causal=False)[0].transpose(1, 2)
