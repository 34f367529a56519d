"""Megatron's attention masks, reduced to what tree attention needs to know of them.

Core attention gets boolean tensors, True = hidden. A mask must be causal, or hide padding at the end of rows, or both:
then the lengths of the rows describe it. All layers get the same tensor, so it is read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from ...core import comm
from ...core.layout import ReadOnce, shard_positions
from . import compat

# whether the kernels apply the causal mask; with `arbitrary` the mask itself decides
CAUSAL = {
    AttnMaskType.causal: True,
    AttnMaskType.padding_causal: True,
    AttnMaskType.no_mask: False,
    AttnMaskType.padding: False,
}
# by type, the masks that it may come with: (whether the mask hides later keys, whether the kernels are to)
MASKS = {
    AttnMaskType.causal: [(True, True)],
    AttnMaskType.padding_causal: [(True, True), (False, True)],
    AttnMaskType.arbitrary: [(False, False), (True, True)],
}


class MaskRead(NamedTuple):
    """What a mask lets through."""

    causal: bool
    lengths: tuple[int, ...] | None = None
    """Number of keys of every batch row; None if no row is padded."""


def read_mask(
    mask: Tensor | None,
    mask_type: AttnMaskType,
    *,
    batch: int,
    num_queries: int,
    num_keys: int,
    ranks: comm.Ranks,
) -> MaskRead:
    """What this rank's part of a mask lets through, the same on all ranks.

    A mask is not read where Megatron-LM's data loader makes causal ones only (no --reset-attention-mask).

    Args:
        mask: bool [b or 1, 1, rows, columns], True = hidden, or None. rows: this rank's queries, or 1; columns: all
            keys of the sequence, or this rank's.
        num_queries, num_keys: of this rank's share, zigzag.
        ranks: they compare their results when they see a mask for the first time: two all-reduces of b numbers.
    Raises: ValueError on every rank for any other mask.
    """
    if mask is None:
        if mask_type not in CAUSAL:
            raise ValueError(f"attn_mask_type {mask_type} needs an attention_mask: pass one, or use another type")
        return MaskRead(CAUSAL[mask_type])
    if mask_type == AttnMaskType.causal and compat.loads_causal_masks():
        return MaskRead(True)
    return _read(mask, mask_type, batch, num_queries, num_keys, ranks)


@ReadOnce
def _read(
    mask: Tensor, mask_type: AttnMaskType, batch: int, num_queries: int, num_keys: int, ranks: comm.Ranks
) -> MaskRead:
    world, rank = ranks.size, ranks.rank
    total = num_keys * world
    q_pos, k_pos = (shard_positions(n * world, rank, world) for n in (num_queries, num_keys))
    if mask.dim() == 4 and mask.shape[-1] == total:
        k_pos = torch.arange(total)
    fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] == 1 and mask.shape[3] == len(k_pos)
    if mask.dtype != torch.bool or not fits or mask.shape[2] not in (1, num_queries):
        raise ValueError(
            f"attention_mask {mask.dtype} {tuple(mask.shape)}: expected bool [{batch} or 1, 1, {num_queries} or 1, "
            f"{total} or {num_keys}], True = hidden; pass None if nothing is padded"
        )
    shown = ~mask[:, 0]  # [b or 1, queries, keys]
    q_pos, k_pos = q_pos.to(mask.device), k_pos.to(mask.device)
    lengths = torch.where(shown.any(1), k_pos + 1, 0).amax(-1).expand(batch).contiguous()
    ranks.reduce(lengths, "max")
    unpadded = (k_pos < lengths[:, None])[:, None]
    earlier = k_pos[None] <= q_pos[:, None] if mask.shape[2] == num_queries else torch.ones_like(unpadded)
    empty = ~shown.any(-1, keepdim=True)
    differs = torch.stack([(~empty & (shown != x)).any() for x in (unpadded, unpadded & earlier)])
    differs = ranks.reduce(differs.to(torch.int32), "max").tolist()
    allowed = MASKS.get(mask_type, [(False, False)])
    for hides_later, causal in allowed:
        if not differs[hides_later]:
            tokens = tuple(lengths.tolist())
            return MaskRead(causal, None if set(tokens) == {total} else tokens)
    raise ValueError(
        f"attention_mask {tuple(mask.shape)} with attn_mask_type {mask_type} is neither the causal mask of this rank's "
        "rows nor padding at the end of rows: tree attention takes no other mask here. Documents that don't see each "
        "other are packed (packed_seq_params); tree_attn_func takes any mask that is made of ranges"
    )
