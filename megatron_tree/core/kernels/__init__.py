"""Attention over one block of queries and keys, on one device: no communication here."""

from .backends import (
    ACCELERATORS,
    Backend,
    attn_bwd,
    attn_decode,
    attn_delta,
    attn_fwd,
    choose,
    merge_packed,
)
from .fixed_point import FixedPoint
from .index import best_keys, index_scores
from .kv_cache import KVCache, SharedPages
from .leaves import sum_rows

__all__ = [
    "ACCELERATORS",
    "Backend",
    "FixedPoint",
    "KVCache",
    "SharedPages",
    "attn_bwd",
    "attn_decode",
    "attn_delta",
    "attn_fwd",
    "best_keys",
    "choose",
    "index_scores",
    "merge_packed",
    "sum_rows",
]
