"""`tree_shift`: the row after each, as labels of tokens further on need it."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from .. import comm
from ..attention.sequences import layouts_of
from ..config import TreeConfig
from ..layout import Layout
from .scan import Chains, Route, exchange


@comm.public_call
def tree_shift(x: Tensor, *, cp_group, layout: Layout = "zigzag", config: TreeConfig | None = None) -> Tensor:
    """The row after each of this rank's rows in its document, 0 after the last one and in padding. Collective, without
    gradients.

    Args:
        x: [b, s_local, ...], this rank's shard.
        Others as in `tree_halo`.
    Returns: [b, s_local, ...].
    Raises: ``ValueError`` on every rank for shapes that don't fit, calls that differ between ranks, and a prefix tree,
        in which several rows may come after one.
    """
    ranks = comm.Ranks.of(cp_group, x.device, config)
    (layout,) = layouts_of(layout, ranks, "tree_shift", x=x)
    with ranks.call("tree_shift") as call:
        if x.dim() < 2:
            raise ValueError(f"x must be [b, s_local, ...], got {list(x.shape)}")
        if getattr(layout, "tree", ()):
            raise ValueError("layout is of a prefix tree, in which several rows may come after one: pass documents")
        chains = Chains.of(x, "x", ranks, layout)
        tokens = x.shape[1] if isinstance(layout, str) else None
        call.agree(shape=(len(x), *x.shape[2:]), dtype=x.dtype, layout=layout, tokens=tokens, config=config)
        firsts, ends = _neighbours(chains, ranks.rank)
        route = Route("tree_shift", ranks, tuple(map(len, firsts)), tuple(map(len, ends)))
        arrived = exchange(x.detach().transpose(0, 1)[[*chain(*firsts)]], route)
    shifted = torch.zeros_like(x)
    for s in chains.segments[ranks.rank]:
        end = s.row + s.length
        shifted[:, s.row : end - 1] = x[:, s.row + 1 : end]
    shifted[:, [*chain(*ends)]] = arrived.transpose(0, 1)
    return shifted


def _neighbours(chains: Chains, rank: int) -> tuple[list[list[int]], list[list[int]]]:
    """This rank's first rows of segments, by the rank that has the row before, and its last ones, by the rank that has
    the row after."""
    firsts, ends = ([[] for _ in chains.segments] for _ in range(2))
    for (source, _), segment, before in chains.links:
        if before < 0:
            continue
        (holder, _), last, _ = chains.links[before]
        if source == rank:
            firsts[holder].append(segment.row)
        if holder == rank:
            ends[source].append(last.row + last.length - 1)
    return firsts, ends
