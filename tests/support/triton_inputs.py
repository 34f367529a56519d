"""Inputs of the Triton kernels: on the GPU where there is one, elsewhere for the interpreter."""

import pytest
import torch

from megatron_tree.core.kernels.triton import host

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEG_INF = float("-inf")


def inputs(s_q, s_k, heads=(4, 2), d=16, d_v=16, batch=2, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    h, h_kv = heads
    shapes = ((s_q, h, d), (s_k, h_kv, d), (s_k, h_kv, d_v), (s_q, h, d_v))
    return [torch.randn(batch, *s, generator=g).to(DEVICE, dtype) for s in shapes]


def skip_without(stored):
    """End a test of a cache in this dtype where the GPU has none."""
    if stored == torch.float8_e4m3fn and host.arch(torch.device(DEVICE)) == "sm80":
        pytest.skip("fp8 needs sm_89 or later")
