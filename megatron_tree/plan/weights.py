"""What a decode step of ranks that share a model's weights reads more of, so as to send less."""

from __future__ import annotations

from collections.abc import Sequence

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
