"""The fewest bytes that exact attention without a mask moves between nodes; docs/planner.md, "Bytes between nodes"."""

from __future__ import annotations

from math import sqrt

from .plans import Shape


def least_rows(nodes: int, num_heads: int, num_heads_kv: int) -> float:
    """Rows of other nodes' tokens, of queries or keys of one head, that a node needs per token of its own (mean).

    Nodes hold equally many tokens and compute equally many pairs. A query's row goes with its result, a key's
    with its value. Memory is unlimited.
    """
    queries = num_heads // num_heads_kv
    if queries >= nodes - 1:
        return num_heads_kv * (nodes - 1)
    whole_heads = (num_heads + num_heads_kv) * (nodes - 1) / nodes
    area = num_heads * (nodes - 1) + queries
    keys = min(nodes, sqrt(area))
    return max(whole_heads, keys + area / keys - queries - 1)


def least_bytes(nodes: int, shape: Shape, *, batch: int, tokens: int, bytes_per_word: int) -> float:
    """Bytes that a rank sends to other nodes in a forward at least, and as many in a backward; the mean over the ranks.

    nodes: with equally many ranks each. tokens: of one rank's shard.
    """
    h, h_kv, d, d_v = shape
    return least_rows(nodes, h, h_kv) * batch * tokens * (d + d_v) * bytes_per_word
