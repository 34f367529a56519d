"""Attention over one block of queries and keys, on one device: no communication here."""

from .dispatch import (
    Choice,
    PagedKV,
    Visible,
    attn_bwd,
    attn_decode,
    attn_delta,
    attn_fwd,
    check_pages,
    choose,
    gather_row,
    merge_packed,
)

__all__ = [
    "Choice",
    "PagedKV",
    "Visible",
    "attn_bwd",
    "attn_decode",
    "attn_delta",
    "attn_fwd",
    "check_pages",
    "choose",
    "gather_row",
    "merge_packed",
]
