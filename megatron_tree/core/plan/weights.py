"""What ranks that share a model's weights send, and what they read more of so as to send less: in a decode step, and in
a chunk of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cost import PlacedTopology
from .decode import gathered, gathered_queries


def splits_latents(
    placed: PlacedTopology, projections: Sequence[tuple[float, float]], bytes_per_word: int, batch: int = 1
) -> bool:
    """Whether a decode step is faster if the ranks share MLA's projections into latents and gather what they give.

    projections: of a layer, or of all: words of each, and columns of its result, which every rank needs.
    """
    world = placed.world
    saved = sum(words for words, _ in projections) * bytes_per_word * (1 - 1 / world)
    messages = (gathered(placed, batch * columns / world * bytes_per_word)[0] for _, columns in projections)
    return sum(messages) < saved / placed.topology.memory_bandwidth


def repeats_queries(placed: PlacedTopology, projection: tuple[float, float], bytes_per_word: int) -> bool:
    """Whether a decode step of one row is faster if each rank of a head group computes all of its queries, which are
    then not gathered.

    placed: of a head group. projection: of a layer: words of its weights, and columns of its result.
    """
    words, columns = projection
    more = words * bytes_per_word * (1 - 1 / placed.world) / placed.topology.memory_bandwidth
    return more < gathered_queries(placed, columns / placed.world * bytes_per_word)[0]


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
    """How the ranks run a chunk; bytes are what one rank sends, without what `tree_prefill` sends in both forms."""

    shares_tokens: bool
    """Every rank runs its tokens, else all tokens."""
    gathers: tuple[bool, ...]
    """Then, by block: its weights are gathered; otherwise its tokens are."""
    sharing: float
    """Bytes if tokens are shared."""
    otherwise: float
    """Bytes if every rank runs all tokens."""


def plan_prefill(num_tokens: int, sizes: PrefillSizes) -> PrefillPlan:
    """The form of a chunk of num_tokens that sends fewer bytes.

    Either every rank runs all tokens with its part of the weights, and partial results are added up after attention and
    after every other block (an MLP, experts). Or every rank runs its tokens; the weights of attention are gathered, and
    those of every other block, unless its tokens are fewer bytes (gathered before, reduced and scattered after it).
    """
    world, groups = sizes.world, sizes.head_groups
    hidden = num_tokens * sizes.hidden * (world - 1) / world  # gathered, or reduced and scattered
    otherwise = 2 * hidden * (1 + len(sizes.attention) + len(sizes.blocks))  # 1: the embedding
    otherwise += num_tokens * (sizes.gathered * (world - 1) / world + sizes.experts)
    gathers = tuple(num_bytes <= 2 * hidden for num_bytes in sizes.blocks)
    sharing = (hidden + num_tokens * sizes.experts) / world + sum(sizes.attention)
    sharing += sum(min(num_bytes, 2 * hidden) for num_bytes in sizes.blocks)
    sharing += len(sizes.attention) * num_tokens / world * sizes.heads * (groups - 1) / groups
    return PrefillPlan(sharing < otherwise, gathers, sharing, otherwise)
