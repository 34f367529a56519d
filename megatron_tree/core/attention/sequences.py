"""Cutting a sequence into the ranks' shards, and joining shards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import comm
from ..arguments import checked
from ..config import TreeConfig, integer
from ..layout import (
    Dispatched,
    Layout,
    PrefixTree,
    Sharding,
    check_layout,
    document_bounds,
    shard_lengths,
    shard_positions,
    spread_documents,
    spread_tree,
)

_DEFAULT = TreeConfig()


@comm.outside_graphs
@checked
def dispatch_documents(cu_seqlens: Tensor | Sequence[int], cp_group, *, multiple_of: int = 1) -> Dispatched:
    """A layout of packed documents for `tree_attn_varlen_func`, without padding documents. No communication.

    Short documents lie whole on one rank, and send nothing; long ones are spread. All ranks have equally many rows and
    about the same causal work (within 5 % where the documents allow it). All ranks get the same layout.
    `shard_sequence(x, cp_group, dim, layout)` gives a rank its rows of tokens, labels and the like,
    `document_positions` their positions, and `unshard_sequence` undoes it.

    Args:
        cu_seqlens: integers [n + 1], from 0: the boundaries of the documents, one after another without padding.
        cp_group: the ranks, a process group or a 1-D DeviceMesh; None for one.
        multiple_of: each rank's number of rows is a multiple of this (with sequence parallelism: the tensor-parallel
            size). Rows that hold no token come last.
    Raises: ``ValueError`` for boundaries that don't start at 0 or decrease.
    """
    bounds = document_bounds("cu_seqlens", cu_seqlens)
    lengths = tuple(b - a for a, b in itertools.pairwise(bounds))
    return spread_documents(lengths, _num_ranks(cp_group), multiple_of=_rows(multiple_of))


@comm.outside_graphs
@checked
def dispatch_prefix_tree(tree: PrefixTree, cp_group, *, multiple_of: int = 1) -> Dispatched:
    """A layout of a tree's packed row: for `tree_attn_func`, beside `ranges=tree.ranges()`, and for `tree_recurrence`
    and its like, whose states part where rows do. No communication.

    Its runs between the places where rows part are spread as documents are (`dispatch_documents`), by what their tokens
    see; those that several rows share over more ranks, since many need their keys.

    Args: as of `dispatch_documents`. Raises: ``ValueError`` for a bad multiple_of.
    """
    return spread_tree(tree.runs(), _num_ranks(cp_group), multiple_of=_rows(multiple_of))


def _num_ranks(cp_group) -> int:
    return comm.group_size(comm.process_group(cp_group))


def _rows(multiple_of: object) -> int:
    rows = integer(multiple_of)
    if rows is None or rows < 1:
        raise ValueError(f"multiple_of={multiple_of!r} must be a positive integer")
    return rows


def layouts_of(layout: Layout, ranks: comm.Ranks, name: str, *, dim: int = 1, **shards: Tensor) -> list[Layout]:
    """The layout of every sequence of which this rank has a shard, along `dim`: "contiguous" as the lengths that the
    ranks have, any other as it is. Collective where it is "contiguous".

    Ranks with 8 tokens beside one with 9 can't tell that from their own shards, so all tell the others how many they
    have, in a small call of its own; a tuple of lengths saves it. name: of the public function.
    Raises: ``ValueError`` on all ranks for lengths that `shard_sequence` does not give.
    """
    world = ranks.size
    if not (isinstance(layout, str) and layout == "contiguous") or world == 1:
        return [layout] * len(shards)
    with ranks.call(f"{name}(layout='contiguous')", differentiable=True) as call:
        for x_name, x in shards.items():
            _check_dim(x, dim, x_name)
        call.agree(sequences=tuple(shards))
        counts = torch.tensor([[x.shape[dim] for x in shards.values()]])
        of_ranks = comm.start_gather(counts.to(ranks.device), ranks.everyone).wait().T.tolist()
    layouts = []
    for x_name, lengths in zip(shards, map(tuple, of_ranks)):
        if lengths != (given := shard_lengths(sum(lengths), world, layout)):
            raise ValueError(
                f"{x_name} has {lengths} tokens on the ranks, but layout='contiguous' gives them {given}: pass "
                f"layout={lengths}"
            )
        layouts.append(lengths)
    return layouts


def sharding_of(x: Tensor, name: str, ranks: comm.Ranks, layout: Layout) -> Sharding:
    """The sharding of the sequence of which x [b, s/p, ...] is this rank's shard. Raises ``ValueError`` for a layout
    that does not fit it."""
    world, rank = ranks.size, ranks.rank
    layout = check_layout(layout, world)
    if not isinstance(layout, tuple):
        shard_lengths(x.shape[1] * world, world, layout)  # zigzag needs an even length
        return Sharding(seq_len=x.shape[1] * world, world=world, layout=layout)
    if x.shape[1] != layout[rank]:
        raise ValueError(f"{name} has {x.shape[1]} tokens on rank {rank} but layout={layout} gives it {layout[rank]}")
    return Sharding(seq_len=sum(layout), world=world, layout=layout)


@comm.outside_graphs
@checked
def shard_sequence(x: Tensor, cp_group, dim: int, layout: Layout = "zigzag", *, padding: float = 0) -> Tensor:
    """This rank's shard of x, which holds the whole sequence along `dim`. Differentiable; no communication.

    Args:
        x: equal on all ranks of cp_group.
        layout: which positions a rank gets, see `tree_attn_func`. A shard does not know its layout: pass the same
            one to every call over these shards, and to `unshard_sequence`.
        padding: fill value for the padding rows of dispatched documents, for instance labels of -100.
    Raises: ValueError if the length can't be sharded in this layout (zigzag: a multiple of twice the ranks).
    """
    cp_group = comm.process_group(cp_group)
    world, rank = comm.group_size(cp_group), comm.group_rank(cp_group)
    comm.check_local(x=x)
    _check_dim(x, dim, "x")
    seq_len = x.shape[dim]
    if isinstance(layout, Dispatched):
        if seq_len != layout.starts[-1]:
            raise ValueError(f"x has {seq_len} tokens along dim {dim}, but the documents have {layout.starts[-1]}")
        seq_len = layout.num_rows * world
    rows = shard_positions(seq_len, rank, world, layout, device=x.device)
    if not isinstance(layout, Dispatched):
        return x.index_select(dim, rows)
    count = sum(s.length for s in layout.source(rank, world))
    shard = x.index_select(dim, rows[:count])
    shape = list(shard.shape)
    shape[dim] = layout.num_rows - count
    return torch.cat((shard, shard.new_full(shape, padding)), dim)


@comm.public_call
def unshard_sequence(x: Tensor, cp_group, dim: int, layout: Layout = "zigzag", seq_len: int | None = None) -> Tensor:
    """The whole sequence, on every rank, from the shards of `shard_sequence` in this layout. One all-gather; no
    gradients.

    seq_len: length of the whole sequence; default: that of the shards together.
    """
    ranks = comm.Ranks.of(cp_group, x.device, _DEFAULT)
    if seq_len is None:
        (layout,) = layouts_of(layout, ranks, "unshard_sequence", dim=dim, x=x)
    world, rank = ranks.size, ranks.rank
    with ranks.call("unshard_sequence") as call:
        _check_dim(x, dim, "x")
        layout = check_layout(layout, world)
        if isinstance(layout, Dispatched):
            seq_len = layout.num_rows * world
        if seq_len is None:
            seq_len = sum(layout) if isinstance(layout, tuple) else x.shape[dim] * world
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
        whole = ranks.gather(rows).unflatten(0, (world, -1))
    out = rows.new_zeros(layout.starts[-1] if isinstance(layout, Dispatched) else seq_len, *rows.shape[1:])
    for r in range(world):
        at = shard_positions(seq_len, r, world, layout, device=x.device)
        out[at[at >= 0]] = whole[r, : lengths[r]][at >= 0]
    return out.movedim(0, dim)


def _check_dim(x: Tensor, dim: int, name: str) -> None:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim} is not a dimension of {name}, which has shape {tuple(x.shape)}")
