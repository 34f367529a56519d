"""Attention over one block of queries and keys, on one device: no communication here."""

from .backends import (
    Backend,
    attn_bwd,
    attn_decode,
    attn_delta,
    attn_fwd,
    choose,
)
from .fixed_point import FixedPoint
from .index import best_keys, index_scores
from .kv_cache import KVCache, SharedPages
from .leaves import sum_rows
from .states import ACCELERATORS, StateReducer, merge_into, merge_packed, triton_for, write_eight_bits
from .steps import Steps, largest_of

__all__ = [
    "ACCELERATORS",
    "Backend",
    "FixedPoint",
    "KVCache",
    "SharedPages",
    "StateReducer",
    "Steps",
    "attn_bwd",
    "attn_decode",
    "attn_delta",
    "attn_fwd",
    "best_keys",
    "choose",
    "index_scores",
    "largest_of",
    "merge_into",
    "merge_packed",
    "sum_rows",
    "triton_for",
    "write_eight_bits",
]
