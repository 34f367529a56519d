"""Attention over one block of queries and keys, on one device: no communication here."""

from .dispatch import Choice, attn_bwd, attn_fwd, attn_fwd_masked, choose

__all__ = ["Choice", "attn_bwd", "attn_fwd", "attn_fwd_masked", "choose"]
