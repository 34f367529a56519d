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
def tree_shift(
    x: Tensor, *, cp_group, layout: Layout = "zigzag", sums: bool = False, config: TreeConfig | None = None
) -> Tensor:
    """The row after each of this rank's rows in its document, 0 after the last one and in padding. Collective, without
    gradients.

    Args:
        x: [b, s_local, ...], this rank's shard.
        sums: where several rows of a prefix tree come after one, whether to return their sum; default: the first.
        Others as in `tree_halo`.
    Returns: [b, s_local, ...].
    Raises: ``ValueError`` on every rank for shapes that don't fit, and calls that differ between ranks.
    """
    ranks = comm.Ranks.of(cp_group, x.device, config)
    (layout,) = layouts_of(layout, ranks, "tree_shift", x=x)
    with ranks.call("tree_shift") as call:
        if x.dim() < 2:
            raise ValueError(f"x must be [b, s_local, ...], got {list(x.shape)}")
        chains = Chains.of(x, "x", ranks, layout)
        tokens = x.shape[1] if isinstance(layout, str) else None
        shape = (len(x), *x.shape[2:])
        call.agree(shape=shape, dtype=x.dtype, layout=layout, tokens=tokens, sums=sums, config=config)
        firsts, ends = _neighbours(chains, ranks.rank, sums)
        route = Route("tree_shift", ranks, tuple(map(len, firsts)), tuple(map(len, ends)))
        arrived = exchange(x.detach().transpose(0, 1)[[*chain(*firsts)]], route)
    shifted = torch.zeros_like(x)
    for s in chains.segments[ranks.rank]:
        end = s.row + s.length
        shifted[:, s.row : end - 1] = x[:, s.row + 1 : end]
    ends = torch.tensor([*chain(*ends)], dtype=torch.int64, device=x.device)
    return shifted.index_add_(1, ends, arrived.transpose(0, 1))


def _neighbours(chains: Chains, rank: int, all_of_them: bool) -> tuple[list[list[int]], list[list[int]]]:
    """This rank's first rows of segments, by the rank that has the row before, and its last ones, by the rank that has
    the row after; of several segments after one all, or the first."""
    firsts, ends = ([[] for _ in chains.segments] for _ in range(2))
    followed = {-1}
    for (source, _), segment, before in chains.links:
        if before in followed:
            continue
        if not all_of_them:
            followed.add(before)
        (holder, _), last, _ = chains.links[before]
        if source == rank:
            firsts[holder].append(segment.row)
        if holder == rank:
            ends[source].append(last.row + last.length - 1)
    return firsts, ends
