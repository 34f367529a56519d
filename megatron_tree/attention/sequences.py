"""Cutting a sequence into the ranks' shards, and joining shards."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import comm
from ..config import TreeConfig
from ..layout import Layout, check_layout, shard_lengths, shard_positions

_DEFAULT = TreeConfig()


def shard_sequence(x: Tensor, cp_group, dim: int, layout: Layout = "zigzag") -> Tensor:
    """This rank's shard of x, which holds the whole sequence along `dim`. Differentiable; no communication.

    Raises ``ValueError`` if the length can't be sharded in this layout (zigzag: a multiple of twice the ranks).
    """
    world, rank = comm.group_size(cp_group), comm.group_rank(cp_group)
    return x.index_select(dim, shard_positions(x.shape[dim], rank, world, layout, device=x.device))


def unshard_sequence(x: Tensor, cp_group, dim: int, layout: Layout = "zigzag", seq_len: int | None = None) -> Tensor:
    """The whole sequence, on every rank, from the shards of `shard_sequence`. One all-gather; no gradients.

    seq_len: length of the whole sequence; needed for an uneven "contiguous" layout, default p times this rank's length.
    """
    world, rank = comm.group_size(cp_group), comm.group_rank(cp_group)
    with comm.collective_call("unshard_sequence", cp_group, _DEFAULT) as call:
        check_layout(layout, world)
        if seq_len is None:
            seq_len = sum(layout) if isinstance(layout, (tuple, list)) else x.shape[dim] * world
        lengths = shard_lengths(seq_len, world, layout)
        if x.shape[dim] != lengths[rank]:
            raise ValueError(
                f"x has {x.shape[dim]} tokens along dim {dim} on rank {rank}, but layout={layout!r}, seq_len={seq_len} "
                f"gives it {lengths[rank]}: pass the seq_len of the whole sequence"
            )
        others = tuple(n for i, n in enumerate(x.shape) if i != dim % x.dim())
        call.agree(**{"shape without dim": others}, dtype=x.dtype, seq_len=seq_len, layout=layout)
        rows = x.detach().movedim(dim, 0)
        rows = torch.cat((rows, rows.new_zeros(max(lengths) - rows.shape[0], *rows.shape[1:])))
        whole = comm.gather_sequence(rows, cp_group).unflatten(0, (world, -1))
    out = rows.new_zeros(seq_len, *rows.shape[1:])
    for r in range(world):
        out[shard_positions(seq_len, r, world, layout, device=x.device)] = whole[r, : lengths[r]]
    return out.movedim(0, dim)
