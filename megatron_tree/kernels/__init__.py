"""Attention over one block of queries and keys, on one device: no communication here."""

from .backends import ACCELERATORS, Backend, attn_bwd, attn_decode, attn_fwd, choose
from .by_device import attn_delta, merge_packed
from .masks import Visible
from .paged import PagedKV, SharedPages, gather_row

__all__ = [
    "ACCELERATORS",
    "Backend",
    "PagedKV",
    "SharedPages",
    "Visible",
    "attn_bwd",
    "attn_decode",
    "attn_delta",
    "attn_fwd",
    "choose",
    "gather_row",
    "merge_packed",
]
