"""Megatron's attention masks, reduced to what tree attention needs to know of them.

Core attention gets boolean tensors, True = hidden. A mask must be causal, or hide padding at the end of rows, or both:
then the lengths of the rows say it all. Or it is causal within documents that lie one after another in a row, as with
--reset-attention-mask. All layers get the same tensor, so it is read once.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ... import comm
from ...layout import Dispatched, documents_over, shard_positions
from . import compat

# whether the kernels apply the causal mask; for `arbitrary` the mask itself decides
CAUSAL = {
    AttnMaskType.causal: True,
    AttnMaskType.padding_causal: True,
    AttnMaskType.no_mask: False,
    AttnMaskType.padding: False,
}

_read: WeakIdKeyDictionary = WeakIdKeyDictionary()  # mask -> (its version, how it was read, what was found)


class MaskRead(NamedTuple):
    """What a mask shows."""

    causal: bool
    lengths: tuple[int, ...] | None = None
    """Number of keys of every batch row; None if no row is padded."""
    documents: Dispatched | None = None
    """Documents in the rows of the batch, one row after another; None if every row is one."""


def read_mask(
    mask: Tensor | None,
    mask_type: AttnMaskType,
    *,
    batch: int,
    num_queries: int,
    num_keys: int,
    cp_group,
    timeout_s: float = 600.0,
) -> MaskRead:
    """What this rank's part of a mask shows, the same on all ranks.

    A mask is not read where Megatron-LM's data loader makes causal ones only (no --reset-attention-mask).

    Args:
        mask: bool [b or 1, 1, rows, columns], True = hidden, or None. rows: this rank's queries, or 1; columns: all
            keys of the sequence, or this rank's.
        num_queries, num_keys: of this rank's share, zigzag.
        cp_group: its ranks compare their results when they see a mask for the first time: two all-reduces of b numbers,
            each within timeout_s.
    Raises: ValueError on every rank for any other mask.
    """
    if mask is None:
        if mask_type not in CAUSAL:
            raise ValueError(f"attn_mask_type {mask_type} needs an attention_mask: pass one, or use another type")
        return MaskRead(CAUSAL[mask_type])
    if mask_type == AttnMaskType.causal and compat.loads_causal_masks():
        return MaskRead(True)
    how = (mask_type, batch, num_queries, num_keys, cp_group)
    known = _read.get(mask)
    if known is None or known[:2] != (mask._version, how):
        known = _read[mask] = mask._version, how, _find(mask, *how, timeout_s)
    return known[2]


def _find(
    mask: Tensor, mask_type: AttnMaskType, batch: int, num_queries: int, num_keys: int, cp_group, timeout_s: float
):
    world, rank = comm.group_size(cp_group), comm.group_rank(cp_group)
    q_pos, k_pos = (shard_positions(n * world, rank, world) for n in (num_queries, num_keys))
    if mask.dim() == 4 and mask.shape[-1] == num_keys * world:
        k_pos = torch.arange(num_keys * world)
    fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] == 1 and mask.shape[3] == len(k_pos)
    if mask.dtype != torch.bool or not fits or mask.shape[2] not in (1, num_queries):
        raise ValueError(
            f"attention_mask {mask.dtype} {tuple(mask.shape)}: expected bool [{batch} or 1, 1, {num_queries} or 1, "
            f"{num_keys * world} or {num_keys}], True = hidden; pass None if nothing is padded"
        )
    seen = ~mask[:, 0]
    q_pos, k_pos = q_pos.to(mask.device), k_pos.to(mask.device)
    lengths = torch.where(seen.any(1), k_pos + 1, 0).amax(-1).expand(batch).contiguous()
    comm.all_reduce(lengths, cp_group, op="max", timeout_s=timeout_s)
    padded = (k_pos < lengths[:, None])[:, None]
    above = k_pos[None] <= q_pos[:, None] if mask.shape[2] == num_queries else torch.ones_like(padded)
    plain, causal = ((~seen.any(-1, keepdim=True) | (seen == x)).all() for x in (padded, padded & above))
    agreed = ~torch.stack((plain, causal))
    found = comm.all_reduce(agreed.to(torch.int32), cp_group, op="max", timeout_s=timeout_s).tolist()
    allowed = {
        AttnMaskType.causal: [(1, True)],
        AttnMaskType.padding_causal: [(1, True), (0, True)],
        AttnMaskType.arbitrary: [(0, False), (1, True)],
    }.get(mask_type, [(0, False)])
    for which, is_causal in allowed:
        if not found[which]:
            tokens = tuple(lengths.tolist())
            return MaskRead(is_causal, None if set(tokens) == {num_keys * world} else tokens)
    square = mask.shape[2:] == (num_queries, num_queries * world)
    if square and num_keys == num_queries and any(is_causal for _, is_causal in allowed):
        documents = _documents(seen, q_pos, k_pos, batch, cp_group, timeout_s)
        if documents is not None:
            return MaskRead(True, documents=documents)
    raise ValueError(
        f"attention_mask {tuple(mask.shape)} with attn_mask_type {mask_type} is neither the causal mask of this rank's "
        "rows, also within documents, nor padding at the end of rows: tree attention takes no other mask here "
        "(tree_attn_func takes any mask that is made of ranges)"
    )


def _documents(seen: Tensor, q_pos: Tensor, k_pos: Tensor, batch: int, cp_group, timeout_s: float) -> Dispatched | None:
    """The documents of a mask [b or 1, queries, keys], True = visible, that is causal within each; None for others."""
    world = comm.group_size(cp_group)
    total = len(q_pos) * world
    first = torch.where(seen, k_pos, total).amin(-1)  # [b, queries]: the first key that is seen
    begins = torch.full((len(seen), total), -1, dtype=torch.int64, device=seen.device)
    begins[:, q_pos] = first
    comm.all_reduce(begins, cp_group, op="max", timeout_s=timeout_s)
    own = begins == torch.arange(total, device=seen.device)  # where a document begins
    inside = torch.where(own, begins, -1).cummax(-1).values
    shown = (k_pos >= first[..., None]) & (k_pos <= q_pos[:, None])
    wrong = torch.tensor([int(not (torch.equal(inside, begins) and torch.equal(seen, shown)))], device=seen.device)
    if int(comm.all_reduce(wrong, cp_group, op="max", timeout_s=timeout_s)):
        return None
    edges = [[*row.nonzero().flatten().tolist(), total] for row in own.expand(batch, -1)]
    lengths = tuple(b - a for row in edges for a, b in itertools.pairwise(row))
    return documents_over(lengths, lengths, world, batch=batch)
