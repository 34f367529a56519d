"""Which rank holds which tokens: layouts, positions, and the segments that kernels work on."""

from .dispatch import spread_documents, spread_tree
from .documents import Dispatched, Packed, ReadOnce, TreeRun, document_bounds, packed_layout, tree_of_blocks
from .segments import Segment, by_document, in_chunks, join, positions_of, sequences_of, visible_rows
from .shards import (
    LAYOUTS,
    Layout,
    Sharding,
    check_layout,
    document_positions,
    documents_over,
    gathered_segments,
    shard_lengths,
    shard_positions,
    shard_segments,
)


def __getattr__(name: str):
    """Names that need torch, which planning does without."""
    if name not in ("PrefixTree", "prefix_tree"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import prefix_trees

    return getattr(prefix_trees, name)


__all__ = [
    "LAYOUTS",
    "Dispatched",
    "Layout",
    "Packed",
    "PrefixTree",
    "ReadOnce",
    "Segment",
    "Sharding",
    "TreeRun",
    "by_document",
    "check_layout",
    "document_bounds",
    "document_positions",
    "documents_over",
    "gathered_segments",
    "in_chunks",
    "join",
    "packed_layout",
    "positions_of",
    "prefix_tree",
    "sequences_of",
    "shard_lengths",
    "shard_positions",
    "shard_segments",
    "spread_documents",
    "spread_tree",
    "tree_of_blocks",
    "visible_rows",
]
