"""A batch cut into the ranks' shards: zigzag along the sequence, or short documents whole on one rank."""

from __future__ import annotations

import contextvars
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.arguments import checked
from ....core.attention.sequences import dispatch_documents, dispatch_prefix_tree, shard_sequence
from ....core.comm import group_rank, group_size, process_group
from ....core.config import TreeConfig
from ....core.layout import Dispatched, PrefixTree, document_positions, documents_over
from ....core.log import warn_once

IGNORED = -100  # Transformers' label of a token that has no loss
BATCH_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")
TYPES = ("mm_token_type_ids", "token_type_ids")  # of tokens: 0 text, 1 image
OF_IMAGES = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "spatial_shapes")
OF_IMAGES += ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
OF_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # position_ids say the same


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeBatch:
    """Which tokens of a batch are in a shard."""

    inputs: dict[str, Tensor]
    """The batch without labels."""
    rows: Tensor
    """int64 [s / p] or, if packed, [t / p]: for each token of the shard its number in the row, or in all rows one after
    another; -1 for padding."""
    packed: bool

    def share(self, x: Tensor) -> Tensor:
        """[..., b, s] -> [..., b, s / p] or, if packed, [..., 1, t / p]; padding repeats the first token."""
        return (x.flatten(-2).unsqueeze(-2) if self.packed else x)[..., self.rows.clamp(min=0)]


class SequenceShard:
    """What the layers and the loss need to know about a batch made by `shard_batch`.

    No dataclass: wrappers with a dtype of their own (FSDP2, by its MixedPrecisionPolicy) give a module copies of the
    dataclasses among its arguments, whose tensors they have cast.
    """

    def __init__(
        self,
        *,
        cp_group,
        loss_group,
        config: TreeConfig | None,
        num_tokens: int,
        documents: Dispatched | None,
        dropout_seed: str | None,
        whole_shape: tuple[int, int],
        row_lengths: Tensor,
        whole: WholeBatch,
        image_blocks: tuple[tuple[int, int], ...] = (),
        prefix_tree: PrefixTree | None = None,
        weights: Tensor | None = None,
    ):
        """
        Args:
            num_tokens: tokens of this rank's shard.
            documents: who holds what of a packed batch; None: one sequence per row, zigzag.
            whole_shape: [b, s] of the batch.
            row_lengths: int64 [b, 1] or [1, t / p]: tokens of each row or, if packed, of the document of each of this
                rank's tokens.
            image_blocks: (first, one past the last) token of each run of image tokens that see each other, of all rows
                in a line.
            prefix_tree: of which the packed batch is; `documents` has one document then.
            weights: fp32 [1, t / p] of the labels in the loss; None: 1 each.
        """
        self.cp_group, self.loss_group, self.config = cp_group, loss_group, config
        self.num_tokens, self.documents, self.dropout_seed = num_tokens, documents, dropout_seed
        self.whole_shape, self.row_lengths, self.whole = whole_shape, row_lengths, whole
        self.image_blocks, self.prefix_tree, self.weights = image_blocks, prefix_tree, weights
        self.token_values: Callable[[Tensor, Tensor], Tensor] | None = None
        """What the loss function makes of logits and labels instead of the mean (loss.py)."""
        self.used_by: dict = {}
        """Windows of the layers that the model's last run has given this shard, by number; and "loss"."""

    def changed(self, **values) -> SequenceShard:
        """This shard with other values, which no layer has used yet."""
        shard = copy.copy(self)
        vars(shard).update(values, used_by={})
        return shard

    @property
    def where(self) -> dict:
        """How the tokens lie on the ranks: options of calls over all of them."""
        return {"cp_group": self.cp_group, "layout": self.documents or "zigzag", "config": self.config}

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

    @functools.cached_property
    def one_document(self) -> Dispatched:
        """The same layout as if all tokens were of one document: for masks of slices."""
        tokens = (self.layout.starts[-1],)
        return replace(self.layout, lengths=tokens, padded=tokens)


current_shard: contextvars.ContextVar[SequenceShard | None] = contextvars.ContextVar("tree_shard", default=None)
"""The shard of the batch that a model runs."""


@checked
def shard_batch(
    batch: Mapping[str, Tensor],
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
            attention_mask [b, s]: 0 for padding, on the right, with labels of -100; a row may have nothing else;
            position_ids [b, s]: a position that is not the previous one plus one starts a new document; if there is an
            attention_mask, one that is not larger, so that positions may have gaps. Documents do not see each other.
            The rows of such a packed batch become one row. What collators tell flash attention
            beside them (cu_seq_lens_q and so on) may stay in the batch.
            position_ids [3, b, s] (M-RoPE: time, height, width) of batches that are not packed, or [4, b, s], whose
            first ones are those in the text. Without any, the model computes its own from mm_token_type_ids.
            pixel_values, image_grid_thw and what else the model takes for its images (docs/huggingface.md).
            mm_token_type_ids, token_type_ids [b, s]: 1 for tokens of images; with token_type_ids (Gemma 3) the tokens
            of an image see each other.
            prefix_tree, alone: a `PrefixTree` of rows that share prefixes, with its labels and their weights.
        cp_group: the ranks that share the sequence, a process group or a 1-D DeviceMesh; None for one rank.
        loss_group: all ranks whose gradients are averaged, likewise; default cp_group.
        tree_config: of the attention.
        dropout_seed: the masks of the attention dropout depend on it and on the layer; needed if the model has dropout.
    Returns: input_ids, position_ids, attention_mask (of ones), shifted labels, all [b, s / ranks] with s rounded up to
        a multiple of twice the ranks (packed: [1, t / ranks], rounded up); `sequence_shard`; use_cache=False.
    Raises: ValueError for unknown keys, wrong shapes, and padding that is not on the right.
    """
    cp_group, loss_group = process_group(cp_group), process_group(loss_group)
    options = {"cp_group": cp_group, "loss_group": cp_group if loss_group is None else loss_group}
    options |= {"config": tree_config, "dropout_seed": dropout_seed}
    if batch.get("prefix_tree") is not None:
        return _shard_of_tree(with_tokens(batch), options)
    ids, labels, mask, positions = _checked(batch)
    of_text = positions if positions.dim() == 2 else positions[0]
    if len(positions) == 3 and positions.dim() == 3:
        of_text = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    lengths, ends = _documents(batch, mask, of_text)
    blocks = _image_blocks(batch)
    if blocks and len(lengths) == 1:  # images differ from row to row
        lengths *= len(ids)
    packed = len(lengths) > 1
    rows, documents = _local_rows(lengths, cp_group, ids.device)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    whole = WholeBatch(inputs=inputs, rows=rows, packed=packed)

    shard = {name: batch[name] for name in OF_IMAGES if batch.get(name) is not None}
    shard |= {"input_ids": whole.share(ids), "position_ids": whole.share(positions)}
    if labels is not None:
        shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if group_rank(cp_group) == 0 and (shifted == IGNORED).all():
            warn_once("a batch has no labels: all are -100, so nothing is learned from it")
        shard["labels"] = whole.share(shifted).masked_fill(rows < 0, IGNORED)
    about = SequenceShard(
        num_tokens=len(rows),
        documents=documents,
        whole_shape=tuple(ids.shape),
        row_lengths=whole.share(ends) if packed else ends[:, :1],
        whole=whole,
        image_blocks=blocks,
        **options,
    )
    return _with_shard(shard, about)


def with_tokens(batch: dict) -> dict:
    """A batch with its prefix tree's tokens, if it has one.

    Raises: ValueError for anything beside the tree, and another object than a `PrefixTree`.
    """
    if (tree := batch.get("prefix_tree")) is None:
        return batch
    if others := sorted(set(batch) - {"prefix_tree"}):
        raise ValueError(f"batch has {others} beside prefix_tree, which has tokens and labels: leave them out")
    if not isinstance(tree, PrefixTree):
        raise ValueError(f"batch['prefix_tree'] is a {type(tree).__name__}: it must be what prefix_tree(rows) returned")
    return {"prefix_tree": tree} | {name: getattr(tree, name) for name in ("input_ids", "position_ids", "labels")}


def _with_shard(shard: dict[str, Tensor], about: SequenceShard) -> dict:
    # with a mask of ones Transformers does not read the shard's positions as packed documents
    return shard | {"attention_mask": torch.ones_like(shard["input_ids"]), "use_cache": False, "sequence_shard": about}


def _shard_of_tree(batch: dict, options: dict) -> dict:
    """`shard_batch` of a prefix tree; its labels are the next tokens already."""
    tree, ids, group = batch.pop("prefix_tree"), batch["input_ids"], options["cp_group"]
    layout = dispatch_prefix_tree(tree, group)
    rows = shard_sequence(torch.arange(ids.shape[1], device=ids.device), group, 0, layout, padding=-1)
    fills = {"input_ids": 0, "position_ids": 0, "labels": IGNORED}
    about = SequenceShard(
        num_tokens=layout.num_rows,
        documents=layout,
        whole_shape=tuple(ids.shape),
        row_lengths=(tree.row_index >= 0).sum(1).max().view(1, 1),
        whole=WholeBatch(inputs={"input_ids": ids}, rows=rows, packed=True),
        prefix_tree=tree,
        weights=shard_sequence(tree.weights, group, 1, layout),
        **options,
    )
    shard = {name: shard_sequence(batch[name], group, 1, layout, padding=fill) for name, fill in fills.items()}
    return _with_shard(shard, about)


def _checked(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """input_ids, labels, attention_mask (bool), all [b, s], and position_ids, [b, s], [3, b, s] or [4, b, s]."""
    known = {*BATCH_KEYS, *TYPES, *OF_IMAGES, *(OF_FLASH if batch.get("position_ids") is not None else ())}
    types = batch.get("token_type_ids")
    if isinstance(types, Tensor) and types.any() and batch.get("pixel_values") is None:
        known.remove("token_type_ids")  # not the types of image tokens
    if unknown := sorted(set(batch) - known):
        names = ", ".join((*BATCH_KEYS, *OF_IMAGES, *TYPES))
        raise ValueError(f"batch has {unknown}: only {names} can be sharded; leave the others out")
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
    if positions.dim() < 2 or (positions.dim() == 2 and len(positions) == 1):
        positions = positions.expand(ids.shape)
    of_text = positions[0] if positions.dim() == 3 and len(positions) in (3, 4) else positions
    shapes = {"labels": labels, "attention_mask": mask, "position_ids": of_text}
    for name, x in (shapes | {name: batch.get(name) for name in TYPES}).items():
        if x is not None and x.shape != ids.shape:
            raise ValueError(f"{name} {list(x.shape)} must have the shape of input_ids, {list(ids.shape)}")
    if mask is not None:
        mask = mask.bool()
        if (mask[:, 1:] & ~mask[:, :-1]).any():
            raise ValueError("attention_mask: padding must be on the right of every row, where no token sees it")
        if labels is not None and (labels[~mask] != IGNORED).any():
            raise ValueError(f"labels of padding (attention_mask 0) must be {IGNORED}")
    return ids, labels, mask, positions


def _image_blocks(batch: dict[str, Tensor]) -> tuple[tuple[int, int], ...]:
    """As `SequenceShard.image_blocks`; a block ends with its row."""
    types = batch.get("token_type_ids")
    if types is None:
        return ()
    edges = F.pad((types == 1).int(), (1, 1)).diff(dim=1)  # [b, s + 1]
    bounds = []
    for edge in (1, -1):
        row, token = (edges == edge).nonzero(as_tuple=True)
        bounds.append((row * types.shape[1] + token).tolist())
    return tuple(zip(*bounds, strict=True))


def _documents(batch: dict, mask: Tensor | None, positions: Tensor) -> tuple[list[int], Tensor]:
    """(lengths of the packed documents, or [s], int64 [b, s]: the length of every token's row or document)."""
    steps = positions.diff(dim=1)
    begins = steps != 1
    if mask is not None:
        begins = (steps < 1) & mask[:, 1:]
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
