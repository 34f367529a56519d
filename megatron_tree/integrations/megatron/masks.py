"""Megatron's attention masks, reduced to the length of every row of a batch.

Core attention gets boolean tensors, True = hidden. Tree attention only needs lengths: a mask must be causal, or hide
padding at the end of rows, or both. All layers get the same tensor, so it is read once.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ... import comm
from ...layout import shard_positions

# whether the kernels apply the causal mask; for `arbitrary` the mask itself decides
CAUSAL = {
    AttnMaskType.causal: True,
    AttnMaskType.padding_causal: True,
    AttnMaskType.no_mask: False,
    AttnMaskType.padding: False,
}

_read: WeakIdKeyDictionary = WeakIdKeyDictionary()  # mask -> (its version, how it was read, what was found)


def read_mask(
    mask: Tensor | None,
    mask_type: AttnMaskType,
    *,
    batch: int,
    num_queries: int,
    num_keys: int,
    cp_group,
    timeout_s: float = 600.0,
) -> tuple[bool, tuple[int, ...] | None]:
    """(whether a mask is causal, number of keys of every batch row, or None if no row is padded).

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
        return CAUSAL[mask_type], None
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
            return is_causal, None if set(tokens) == {num_keys * world} else tokens
    raise ValueError(
        f"attention_mask {tuple(mask.shape)} with attn_mask_type {mask_type} is neither the causal mask of this rank's "
        "rows nor padding at the end of rows: tree attention takes no other mask; turn --reset-attention-mask off, or "
        "pack documents (packed_seq_params)"
    )
