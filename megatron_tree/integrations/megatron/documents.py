"""Packed batches that are not cut document by document: dispatched documents, and a sequence that is cut as a whole.

Megatron's rotary embedding takes every document of a packed batch to be cut zigzag on its own. So for Megatron such a
batch is *one* document over all rows, and `TreePackedSeqParams.layout` says what really lies where: core attention
reads it, and the embedding's table is laid out accordingly.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import comm
from ...attention.sequences import dispatch_documents, shard_sequence
from ...layout import Dispatched, document_positions, documents_over, packed_layout, shard_positions
from . import compat

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip

SHARDED = {"tokens": 0, "labels": 0, "loss_mask": 0.0, "position_ids": 0}
"""Entries of a batch that are cut, and what rows without a token get."""


@dataclass
class TreePackedSeqParams(PackedSeqParams):
    """Megatron's `PackedSeqParams` of one document over all rows, and what lies in them."""

    layout: Dispatched | None = None
    positions: Tensor | None = field(default=None, repr=False)
    """int64 [rows of this rank]: positions for the rotary embedding; None: those in the whole sequence."""
    embedded: bool = False
    """Whether a model that `use_dispatched_documents` prepared has taken it."""

    @classmethod
    def of(cls, layout: Dispatched, positions: Tensor | None, device: Any) -> TreePackedSeqParams:
        rows = len(layout.shares) * layout.num_rows
        bounds = torch.tensor([0, rows], dtype=torch.int32, device=device)
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        lengths = dict(max_seqlen_q=rows, max_seqlen_kv=rows)
        return cls(qkv_format="thd", **dict.fromkeys(names, bounds), **lengths, layout=layout, positions=positions)


def dispatch_batch(
    batch: dict[str, Any], cu_seqlens: Any, *, cp_group: Any = None, multiple_of: int = 1
) -> tuple[dict[str, Any], TreePackedSeqParams]:
    """This rank's share of a packed batch, with short documents whole on one rank; no document needs padding.

    Takes the place of Megatron's `get_thd_batch_on_this_cp_rank`, for a model that went through
    `use_dispatched_documents`. All ranks of cp_group pass the whole batch.

    Args:
        batch: tensors [1, t]; tokens, labels, loss_mask and position_ids are cut (rows without a token get 0), others
            are returned as they are. Missing position_ids are made.
        cu_seqlens: int32 [n + 1], from 0 to t: boundaries of the documents, without padding.
        cp_group: process group or 1-D DeviceMesh; default: Megatron's context-parallel group.
        multiple_of: each rank's rows are a multiple of this and of 2; with sequence parallelism the tensor-parallel
            size.
    Returns: the batch, and the `packed_seq_params` to call the model with.
    Raises: ValueError for bad boundaries, or tensors of another length.
    """
    group = compat.context_parallel_group() if cp_group is None else comm.process_group(cp_group)
    layout = dispatch_documents(cu_seqlens, group, multiple_of=math.lcm(2, multiple_of))
    tensors = {name: batch[name] for name in SHARDED if batch.get(name) is not None}
    if not tensors:
        raise ValueError(f"batch has entries {sorted(batch)}: one of {', '.join(SHARDED)} is needed")
    device = next(iter(tensors.values())).device
    positions = document_positions(layout, comm.group_rank(group), comm.group_size(group), device=device)
    share = {name: shard_sequence(x, group, 1, layout, padding=SHARDED[name]) for name, x in tensors.items()}
    share.setdefault("position_ids", positions[None])
    return {**batch, **share}, TreePackedSeqParams.of(layout, positions, device)


def use_dispatched_documents(model: Any) -> Any:
    """Let a model take the batches of `dispatch_batch`; call it once, after the model is built.

    With Megatron-LM's `--dataloader-inter-document-masking` the model then also takes that option's batches, which are
    cut zigzag as a whole.

    Args:
        model: a GPTModel with tree attention, also wrapped, or a list of model chunks. It is changed.
    Returns: the model.
    Raises: ValueError for multi-token prediction, multimodal rotary embeddings, and recurrent layers, which need
        documents cut one by one.
    """
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        for module in chunk.modules():
            _refuse(module)
        watch_batches(chunk)
    return model


def watch_batches(model: Any) -> None:
    """`use_dispatched_documents` of a model that may never get such a batch: what it can't take is refused then."""
    for module in model.modules():
        embedding = getattr(module, "rotary_pos_emb", None)
        if isinstance(embedding, torch.nn.Module) and not isinstance(embedding.forward, _Placed):
            embedding.forward = _Placed(embedding, compat.context_parallel_group(module))
        if hasattr(module, "decoder") or isinstance(embedding, torch.nn.Module):
            _watch(module)


def _refuse(module: Any) -> None:
    if compat.is_recurrent(module):
        raise ValueError(
            f"{type(module).__name__} (a layer with a recurrent state) needs packed documents that are cut one by one: "
            "use Megatron's own packed batches (get_thd_batch_on_this_cp_rank)"
        )
    kind = getattr(module, "position_embedding_type", None)
    for name, given in (
        ("mtp_num_layers", getattr(getattr(module, "config", None), "mtp_num_layers", None)),
        ("position_embedding_type", kind if kind == "mrope" else None),
    ):
        if given:
            raise ValueError(
                f"{name}={given!r} needs packed documents that are cut one by one: use Megatron's own packed batches "
                "(get_thd_batch_on_this_cp_rank), without --dataloader-inter-document-masking"
            )


class _Placed:
    """The forward of a rotary embedding, whose table holds the rows of `packed` where Megatron looks for them."""

    def __init__(self, embedding: torch.nn.Module, group: Any):
        self._forward, self._group = embedding.forward, group
        self.packed: TreePackedSeqParams | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._forward(*args, **kwargs)
        if self.packed is None or self.packed.positions is None:
            return found
        table, *rest = found if isinstance(found, tuple) else (found,)
        rows = table[self.packed.positions]
        world, rank = comm.group_size(self._group), comm.group_rank(self._group)
        placed = rows.new_zeros(world * len(rows), *rows.shape[1:])
        placed[shard_positions(len(placed), rank, world, device=rows.device)] = rows
        return (placed, *rest) if isinstance(found, tuple) else placed


def _watch(module: Any) -> None:
    """Tell the module's rotary embedding, before every forward, which batch it is for."""
    signature = inspect.signature(type(module).forward)

    def before(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        call = signature.bind(module, *args, **kwargs)
        packed = _cut_as_a_whole(call.arguments.get("packed_seq_params"))
        ours = packed if isinstance(packed, TreePackedSeqParams) else None
        embedding = getattr(module, "rotary_pos_emb", None)
        if isinstance(embedding, torch.nn.Module):
            embedding.forward.packed = ours
        if ours is None:
            return None
        _refuse(module)
        ours.embedded = True
        call.arguments["packed_seq_params"] = ours
        return call.args[1:], call.kwargs

    module.register_forward_pre_hook(before, with_kwargs=True)


def _cut_as_a_whole(packed: Any) -> Any:
    """A batch of Megatron-LM's inter-document masking as `TreePackedSeqParams`; others as they are."""
    if packed is None or isinstance(packed, TreePackedSeqParams) or not compat.cuts_packed_rows_as_a_whole():
        return packed
    documents = packed_layout(packed.cu_seqlens_q)
    layout = documents_over(documents.lengths, documents.padded, comm.group_size(compat.context_parallel_group()))
    return TreePackedSeqParams.of(layout, None, packed.cu_seqlens_q.device)
