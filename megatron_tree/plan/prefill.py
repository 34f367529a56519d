"""A chunk of a prompt where N ranks share a model's weights: do activations move, or weights?

Activations: every rank runs all tokens with its part of the weights, and partial results are added up after attention
and after every other block (an MLP, experts). Weights: every rank runs its tokens; the weights of attention are
gathered, and those of every other block, unless its tokens are fewer bytes (gathered before, reduced and scattered
after it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class PrefillSizes(NamedTuple):
    """What moves in a model on `world` ranks, in bytes."""

    world: int
    head_groups: int
    hidden: int
    """Of one token's hidden state."""
    heads: int
    """Of one token's q, k, v and attention output of a layer, all heads."""
    attention: Sequence[int]
    """By layer: what a rank sends to gather the weights of attention."""
    blocks: Sequence[int]
    """The same of every other block whose partial results are added up."""
    gathered: int = 0
    """Of one token's activations in all layers that are gathered if every rank runs all tokens: latents."""
    experts: float = 0
    """Of one token's copies, in all layers, that a rank which runs it sends to experts and gets back."""


class PrefillPlan(NamedTuple):
    """How the ranks run a chunk; bytes are those that one rank sends, without those of `tree_prefill` in both forms."""

    shares_tokens: bool
    """Every rank runs its tokens, else all tokens."""
    gathers: tuple[bool, ...]
    """Then, by block: its weights are gathered; otherwise its tokens are."""
    sharing: float
    """Bytes if tokens are shared."""
    otherwise: float
    """Bytes if every rank runs all tokens."""


def plan_prefill(num_tokens: int, sizes: PrefillSizes) -> PrefillPlan:
    """The form of a chunk of num_tokens that sends fewer bytes."""
    world, groups = sizes.world, sizes.head_groups
    hidden = num_tokens * sizes.hidden * (world - 1) / world  # gathered, or reduced and scattered
    otherwise = 2 * hidden * (1 + len(sizes.attention) + len(sizes.blocks))  # 1: the embedding
    otherwise += num_tokens * (sizes.gathered * (world - 1) / world + sizes.experts)
    gathers = tuple(num_bytes <= 2 * hidden for num_bytes in sizes.blocks)
    sharing = (hidden + num_tokens * sizes.experts) / world + sum(sizes.attention)
    sharing += sum(min(num_bytes, 2 * hidden) for num_bytes in sizes.blocks)
    sharing += len(sizes.attention) * num_tokens / world * sizes.heads * (groups - 1) / groups
    return PrefillPlan(sharing < otherwise, gathers, sharing, otherwise)
