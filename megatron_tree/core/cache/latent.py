"""Multi-latent attention over a cache of latents: heads attend to them as they are, or to keys and values made of them.

A token's latent c (r numbers) and rotary key, which all heads share, give head h the key [W_uk_h c, rotary key] and the
value W_uv_h c. So q_h . k_h = (W_uk_h^T q_nope_h) . c + q_rope_h . rotary key, and the weighted sum of values is W_uv_h
times that of latents: with queries and outputs changed like this ("absorbed") it is attention with one KV head, whose
key is [c, rotary key] and whose value is c. docs/kv-cache.md, "Latents", derives which way takes less work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.decode import project


class LatentHeads(NamedTuple):
    """How this rank's heads read latents.

    Entries of the cache are [b, s, 1, r + rotary head_dim]: latent, rotary key. Queries are [b, n, h, d] with
    d = head_dim_nope + rotary head_dim, in this order.
    """

    up: Tensor
    """[h, head_dim_nope + head_dim_v, r]: W_uk above W_uv of every head, a view of the model's own weight."""
    head_dim_nope: int
    own: slice = slice(None)
    """Of these heads, those whose results this rank gets."""

    @property
    def rank(self) -> int:
        """Numbers of a latent, r."""
        return self.up.shape[2]

    @property
    def head_dim_v(self) -> int:
        """Of a head's values."""
        return self.up.shape[1] - self.head_dim_nope

    def pays_to_expand(self, num_queries: int) -> bool:
        """Whether it is less work to make a key's keys and values than to let all these queries meet its latent."""
        expanded = self.up.shape[1]
        return num_queries * (2 * self.rank - expanded) > self.rank * expanded

    @property
    def values(self) -> Tensor:
        """[h, head_dim_v, r]: what makes values of latents, of every head."""
        return self.up[:, self.head_dim_nope :]

    def prepare(self, q: Tensor, *, expands: bool) -> tuple[Tensor, dict, Callable[[Tensor], Tensor]]:
        """(queries, options of `tree_prefill`, what makes [b, n, h, d_v] of its result) for one of the two ways."""
        if expands:
            return q, {"expand": self.expand, "head_dim_v": self.head_dim_v}, lambda out: out
        return self.absorb(q), {"head_dim_v": self.rank}, self.project

    def absorb(self, q: Tensor) -> Tensor:
        """Queries for the latents themselves: [b, n, h, r + rotary head_dim]."""
        q_nope, q_rope = q.tensor_split((self.head_dim_nope,), -1)
        return torch.cat((torch.einsum("bnhd,hdr->bnhr", q_nope, self.up[:, : self.head_dim_nope]), q_rope), -1)

    def project(self, out: Tensor) -> Tensor:
        """Weighted sums of latents [b, n, own heads, r] to weighted sums of values [b, n, own heads, d_v]."""
        return project(out, self.values[self.own])

    def expand(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [b, s, own heads, d] and values [b, s, own heads, d_v] of entries of the cache [b, s, 1, r + rotary
        head_dim]."""
        latents, rotary = entries.tensor_split((self.rank,), -1)
        up = self.up[self.own]
        both = F.linear(latents.squeeze(2), up.flatten(0, 1)).unflatten(-1, up.shape[:2])
        k_nope, v = both.tensor_split((self.head_dim_nope,), -1)
        return torch.cat((k_nope, rotary.expand(*k_nope.shape[:3], -1)), -1), v
