"""This package's Triton kernels: the default on CUDA and ROCm. On a CPU they run in Triton's interpreter, for tests."""

from .decode import attn_decode, check_pages
from .eight_bits import write_eight_bits
from .host import attn_bwd, attn_bwd_jvp, attn_delta, attn_fwd, attn_jvp, takes_duals, unsupported
from .index import index_entries, index_unsupported
from .merge import merge_into, merge_packed
from .peers import merge_peers, put_state

__all__ = [
    "attn_bwd",
    "attn_bwd_jvp",
    "attn_decode",
    "attn_delta",
    "attn_fwd",
    "attn_jvp",
    "check_pages",
    "index_entries",
    "index_unsupported",
    "merge_into",
    "merge_packed",
    "merge_peers",
    "put_state",
    "takes_duals",
    "unsupported",
    "write_eight_bits",
]
