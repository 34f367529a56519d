"""A batch cut into the ranks' shards: zigzag along the sequence, or short documents whole on one rank."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.sequences import dispatch_documents, shard_sequence
from ...comm import group_rank, group_size, process_group
from ...config import TreeConfig
from ...layout import Dispatched, document_positions, documents_over
from .token_tiles import IGNORED

BATCH_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")
OF_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # position_ids say the same


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceShard:
    """What the layers and the loss need to know about a batch made by `shard_batch`."""

    cp_group: object
    loss_group: object
    config: TreeConfig | None
    num_tokens: int
    """Tokens of this rank's shard."""
    documents: Dispatched | None
    """Who holds what of a packed batch; None: one sequence per row, zigzag."""
    dropout_seed: str | None
    whole_shape: tuple[int, int]
    """[b, s] of the batch."""
    row_lengths: Tensor
    """int64 [b, 1] or [1, t / p]: tokens of each row or, if packed, of the document of each of this rank's tokens."""
    token_values: Callable[[Tensor, Tensor], Tensor] | None = None
    """What the loss function makes of logits and labels instead of the mean (log_probs.py)."""
    used_by: dict = field(default_factory=dict)
    """Windows of the layers that have used this shard, by number; and "loss"."""

    @functools.cached_property
    def layout(self) -> Dispatched:
        """Who holds what of every row, or of the packed batch."""
        if self.documents is not None:
            return self.documents
        world = group_size(self.cp_group)
        whole = (self.num_tokens * world,)
        return documents_over(whole, whole, world)

    @functools.cached_property
    def positions(self) -> Tensor:
        """int64 [s / p]: of each token in its row or document."""
        group = self.cp_group
        return document_positions(self.layout, group_rank(group), group_size(group), device=self.row_lengths.device)


current_shard: contextvars.ContextVar[SequenceShard | None] = contextvars.ContextVar("tree_shard", default=None)
"""The shard of the batch that a model runs."""


def shard_batch(
    batch: dict[str, Tensor],
    *,
    cp_group,
    loss_group=None,
    tree_config: TreeConfig | None = None,
    dropout_seed: str | None = None,
) -> dict:
    """This rank's shard of a batch, as keyword arguments for the model: zigzag along the sequence or, of packed
    documents, short ones whole on one rank (`dispatch_documents`).

    Args:
        batch: the same on every rank of cp_group:
            input_ids int64 [b, s];
            labels int64 [b, s] as in Transformers: not shifted, -100 for tokens without a loss;
            attention_mask [b, s]: 0 for padding, which is on the right and has labels of -100;
            position_ids [b, s]: a position that is not the previous one plus one starts a new document. Documents do
            not see each other. The rows of such a packed batch become one row. What collators tell flash attention
            beside them (cu_seq_lens_q and so on) may stay in the batch.
        cp_group: the ranks that share the sequence, a process group or a 1-D DeviceMesh; None for one rank.
        loss_group: all ranks whose gradients are averaged, likewise; default cp_group.
        tree_config: of the attention.
        dropout_seed: the masks of the attention dropout depend on it and on the layer; needed if the model has dropout.
    Returns: input_ids, position_ids, attention_mask (of ones), shifted labels, all [b, s / ranks] with s rounded up to
        a multiple of twice the ranks (packed: [1, t / ranks], rounded up); `sequence_shard`; use_cache=False.
    Raises: ValueError for unknown keys, wrong shapes, and padding that is not on the right.
    """
    cp_group, loss_group = process_group(cp_group), process_group(loss_group)
    ids, labels, mask, positions = _checked(batch)
    lengths, ends = _documents(batch, mask, positions)
    packed = len(lengths) > 1
    rows, documents = _local_rows(lengths, cp_group, ids.device)

    def share(x: Tensor) -> Tensor:
        return (x.reshape(1, -1) if packed else x)[:, rows.clamp(min=0)]  # rows of padding are never read

    shard = {"input_ids": share(ids), "position_ids": share(positions)}
    if labels is not None:
        shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        shard["labels"] = share(shifted).masked_fill(rows < 0, IGNORED)
    about = SequenceShard(
        cp_group=cp_group,
        loss_group=cp_group if loss_group is None else loss_group,
        config=tree_config,
        num_tokens=len(rows),
        documents=documents,
        whole_shape=tuple(ids.shape),
        dropout_seed=dropout_seed,
        row_lengths=share(ends) if packed else ends[:, :1],
    )
    # with a mask of ones Transformers does not read the shard's positions as packed documents
    return shard | {"attention_mask": torch.ones_like(shard["input_ids"]), "use_cache": False, "sequence_shard": about}


def _checked(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """input_ids, labels, attention_mask (bool) and position_ids, all [b, s]."""
    unknown = sorted(set(batch) - set(BATCH_KEYS) - set(OF_FLASH if batch.get("position_ids") is not None else ()))
    if unknown:
        raise ValueError(f"batch has {unknown}: only {', '.join(BATCH_KEYS)} can be sharded; leave the others out")
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or 0 in ids.shape or ids.dtype != torch.int64:
        seen = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"input_ids must be int64 [batch, tokens] with at least one token, got {seen}")
    labels, mask, positions = (batch.get(name) for name in BATCH_KEYS[1:])
    for name, x in (("labels", labels), ("attention_mask", mask), ("position_ids", positions)):
        dtype = getattr(x, "dtype", None)
        if x is not None and (dtype is None or (x is not mask and dtype != torch.int64)):
            raise ValueError(f"{name} must be an int64 tensor, got {dtype or type(x).__name__}")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)
    positions = positions.expand(ids.shape) if positions.dim() < 2 or positions.shape[0] == 1 else positions
    for name, x in (("labels", labels), ("attention_mask", mask), ("position_ids", positions)):
        if x is not None and x.shape != ids.shape:
            raise ValueError(f"{name} {list(x.shape)} must have the shape of input_ids, {list(ids.shape)}")
    if mask is not None:
        mask = mask.bool()
        if (mask[:, 1:] & ~mask[:, :-1]).any() or not mask[:, 0].all():
            raise ValueError("attention_mask: padding must be on the right of every row, where no token sees it")
        if labels is not None and (labels[~mask] != IGNORED).any():
            raise ValueError(f"labels of padding (attention_mask 0) must be {IGNORED}")
    return ids, labels, mask, positions


def _documents(batch: dict, mask: Tensor | None, positions: Tensor) -> tuple[list[int], Tensor]:
    """(lengths of the packed documents, or [s], int64 [b, s]: the length of every token's row or document)."""
    begins = positions.diff(dim=1) != 1
    if mask is not None:
        begins &= mask[:, 1:]
        if begins.any() and not mask.all():
            raise ValueError(
                "position_ids that start again (packed documents) can't be combined with an attention_mask that has "
                "padding: leave out the mask; packed documents need no padding"
            )
    if not begins.any():
        real = positions if mask is None else positions * mask
        return [positions.shape[1]], (real.amax(1, keepdim=True) + 1).expand(positions.shape)
    starts = F.pad(begins, (1, 0), value=True).flatten().nonzero().flatten().tolist()
    bounds = [*starts, positions.numel()]
    if (told := batch.get("cu_seq_lens_q")) is not None and told.flatten().tolist() != bounds:
        raise ValueError(f"cu_seq_lens_q={told.tolist()}, but documents in position_ids begin at {starts}")
    lengths = [end - start for start, end in pairwise(bounds)]
    ends = torch.cat([part[-1:].expand(len(part)) for part in positions.flatten().split(lengths)]) + 1
    return lengths, ends.view(positions.shape)


def _local_rows(lengths: list[int], cp_group, device) -> tuple[Tensor, Dispatched | None]:
    """int64 [t / p]: for each of this rank's rows its row in the whole batch, -1 for padding; the layout if packed."""
    whole = torch.arange(sum(lengths), device=device)
    if len(lengths) > 1:
        documents = dispatch_documents([0, *accumulate(lengths)], cp_group)
        return shard_sequence(whole, cp_group, 0, documents, padding=-1), documents
    parts = 2 * group_size(cp_group) if group_size(cp_group) > 1 else 1
    return shard_sequence(F.pad(whole, (0, -len(whole) % parts), value=-1), cp_group, 0), None
