"""Attention over one block of queries and keys, on one device: no communication here."""

from .dispatch import Choice, Visible, attn_bwd, attn_decode, attn_delta, attn_fwd, choose, merge_packed

__all__ = ["Choice", "Visible", "attn_bwd", "attn_decode", "attn_delta", "attn_fwd", "choose", "merge_packed"]
