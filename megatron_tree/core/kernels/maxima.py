"""The largest logit of every head, beside any backend's forward: for Megatron's qk_clip.

A pass of its own over the visible blocks, in torch: q.k once more in fp32, about half the work of a forward, and never
more than a tile of logits at a time. Each pair of a query and a key is in one rank's block, so the maximum over ranks
is that of the whole sequence.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..duals import halves
from ..merge import NEG_INF, state_dtype
from ..spec import AttnSpec
from .blocks import FULL, Block, split, window_mask
from .reference import logits

QUERIES, KEYS = 256, 1024  # rows of a tile


class LargestLogits:
    """A backend's module whose `attn_fwd` also keeps the largest logit of each head of the call in `largest`, [h]."""

    def __init__(self, module: ModuleType, largest: Tensor):
        self.module, self.largest = module, largest

    @classmethod
    def for_queries(cls, module: ModuleType, q: Tensor) -> LargestLogits:
        """For a call whose queries are q."""
        return cls(module, torch.full((q.shape[2],), NEG_INF, dtype=state_dtype(q.dtype), device=q.device))

    def attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None):
        """See `Backend.attn_fwd`. Head 0 of q is head spec.first_head of the call; beyond its last is padding."""
        call = dict(q_segments=q_segments, k_segments=k_segments, spec=spec)
        self._keep_largest(q, k, call)
        return self.module.attn_fwd(q, k, v, **call, out_dtype=out_dtype)

    def attn_jvp(self, q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None):
        """The same of dual tensors."""
        call = dict(q_segments=q_segments, k_segments=k_segments, spec=spec)
        self._keep_largest(halves(q)[0], halves(k)[0], call)
        return self.module.attn_jvp(q, k, v, **call, out_dtype=out_dtype)

    def _keep_largest(self, q: Tensor, k: Tensor, call: dict) -> None:
        of_heads = self.largest[call["spec"].first_head :][: q.shape[2]]
        torch.maximum(of_heads, largest_logits(q, k, **call)[: len(of_heads)], out=of_heads)

    def __getattr__(self, name: str):
        return getattr(self.module, name)


@torch.no_grad()
def largest_logits(q: Tensor, k: Tensor, *, q_segments, k_segments, spec: AttnSpec) -> Tensor:
    """The largest s_a of (1) over the batch and all visible pairs: [h], fp32 (float64 for float64); -inf without any.

    q [b, s_q, h, d], k [b, s_k, h_kv, d]; with spec's scale and softcap, without sinks and dropout.
    """
    dtype = state_dtype(q.dtype)
    largest = torch.full((q.shape[2],), NEG_INF, dtype=dtype, device=q.device)
    for block in split(q_segments, k_segments, spec):
        for i in range(0, block.q_len, QUERIES):
            for j in range(0, block.k_len, KEYS):
                tile = _tile(block, i, j)
                last_seen = None if spec.right is None else tile.q_pos + tile.q_len - 1 + spec.right
                if block.kind != FULL and last_seen is not None and tile.k_pos > last_seen:
                    break  # later keys are hidden from all of these queries
                of_tile = _largest(q[:, tile.q_rows].to(dtype), k[:, tile.k_rows].to(dtype), tile, spec)
                torch.maximum(largest, of_tile, out=largest)
    return largest


def _tile(block: Block, i: int, j: int) -> Block:
    q_len, k_len = min(QUERIES, block.q_len - i), min(KEYS, block.k_len - j)
    return Block(block.kind, block.q_row + i, q_len, block.k_row + j, k_len, block.q_pos + i, block.k_pos + j)


def _largest(q: Tensor, k: Tensor, tile: Block, spec: AttnSpec) -> Tensor:
    s = logits(q, k, spec)
    if tile.kind != FULL:
        q_pos = torch.arange(tile.q_pos, tile.q_pos + tile.q_len, device=q.device)
        k_pos = torch.arange(tile.k_pos, tile.k_pos + tile.k_len, device=q.device)
        s = s.masked_fill(~window_mask(q_pos, k_pos, spec), NEG_INF)
    return s.amax((0, 3, 4)).flatten()
