"""This package's Triton kernels: the default on CUDA and ROCm. On a CPU they run in Triton's interpreter, for tests."""

from .decode import attn_decode, check_pages
from .host import attn_bwd, attn_delta, attn_fwd, unsupported
from .merge import merge_packed

__all__ = ["attn_bwd", "attn_decode", "attn_delta", "attn_fwd", "check_pages", "merge_packed", "unsupported"]
