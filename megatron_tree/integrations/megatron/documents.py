"""Packed batches that are not cut document by document: dispatched documents, and a sequence that is cut as a whole.

Megatron's rotary embedding takes every document of a packed batch to be cut zigzag on its own. So Megatron sees such a
batch as *one* document over all rows, and `TreePackedSeqParams.layout` says what really lies where: core attention
reads it, and the table of the embedding is laid out accordingly.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import comm
from ...core.attention.sequences import dispatch_documents, dispatch_prefix_tree, shard_sequence
from ...core.layout import (
    Dispatched,
    PrefixTree,
    document_bounds,
    document_positions,
    documents_over,
    packed_layout,
    shard_positions,
)
from ...core.recurrence.shift import tree_shift
from . import compat

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip

SHARDED = {"tokens": 0, "labels": 0, "loss_mask": 0.0, "position_ids": 0}
"""Entries of a batch that are cut, with their fill values for padding rows."""


@dataclass
class TreePackedSeqParams(PackedSeqParams):
    """Megatron's `PackedSeqParams` of one document over all rows, and the layout of the real ones."""

    layout: Dispatched | None = None
    prefix_tree: PrefixTree | None = field(default=None, repr=False)
    """Of which the batch is; the layout has one document then."""
    times: Tensor | None = field(default=None, repr=False)
    """fp32 [1, rows of this rank]: how many rows of the tree have each token, and one after it, which they predict."""
    num_tokens: int = 0
    """Such tokens of all rows, 1 at least."""
    positions: Tensor | None = field(default=None, repr=False)
    """int64 [rows of this rank]: positions for the rotary embedding; None: those in the whole sequence."""
    embedded: bool = False
    """Whether a model that `use_dispatched_documents` prepared has seen it."""

    @classmethod
    def of(cls, layout: Dispatched, positions: Tensor | None, device: Any, cp_group: Any = None) -> TreePackedSeqParams:
        rows = len(layout.shares) * layout.num_rows
        packed = cls(qkv_format="thd", max_seqlen_q=rows, max_seqlen_kv=rows, cp_group=cp_group)
        packed.layout, packed.positions = layout, positions
        packed._set_bounds(torch.tensor([0, rows], dtype=torch.int32, device=device))
        return packed

    def show_to(self, model_group: Any) -> None:
        """Give Megatron's rotary embedding a document over the ranks of the model's context parallelism, by which it
        goes; the batch's boundaries may be others."""
        ranks, of_batch = comm.group_size(model_group), len(self.layout.shares)
        if ranks != of_batch:
            self._set_bounds(torch.tensor([0, ranks * self.layout.num_rows]).to(self.cu_seqlens_q))

    def _set_bounds(self, bounds: Tensor) -> None:
        self.cu_seqlens_q = self.cu_seqlens_kv = self.cu_seqlens_q_padded = self.cu_seqlens_kv_padded = bounds


def is_one_document(packed: Any) -> bool:
    """Whether this is an ordinary batch that only names its ranks (Megatron's hybrid context parallelism)."""
    bounds = packed.cu_seqlens_q
    ordinary = packed.qkv_format in ("sbhd", "bshd") and (bounds is None or len(bounds) == 2)
    return ordinary and getattr(packed, "local_cp_size", None) is not None


def check_cut(packed: Any, cp_group: Any) -> None:
    """Raise a ValueError for a packed batch that is not cut document by document, but of which Megatron thinks so."""
    whole = getattr(packed, "layout", None) is None and compat.cuts_packed_rows_as_a_whole()
    matters = comm.group_size(cp_group) > 1 or getattr(packed, "prefix_tree", None) is not None
    if matters:
        compat.check_layout(packed, "cp_partition_mode")
    if (whole or not getattr(packed, "embedded", True)) and matters:
        raise ValueError(
            "this packed batch is not cut document by document (dispatch_batch, or "
            "--dataloader-inter-document-masking), but the model's rotary embedding takes it to be: call "
            "megatron_tree.integrations.megatron.use_dispatched_documents(model) once after the model is built, or "
            "install() before"
        )


def check_rolled(packed: Any, config: Any) -> None:
    """Raise a ValueError for padded documents in multi-token prediction: Megatron rolls tokens and labels at the
    boundaries without padding."""
    number, padded = getattr(config, "mtp_num_layers", None), packed.cu_seqlens_q_padded
    if not number or padded is None:
        return
    bounds, ends = document_bounds("cu_seqlens_q", packed.cu_seqlens_q), document_bounds("cu_seqlens_q_padded", padded)
    if bounds != ends:
        raise ValueError(
            f"mtp_num_layers={number} with documents that end at token {bounds[-1]} (cu_seqlens_q), with their padding "
            f"at {ends[-1]} (cu_seqlens_q_padded): Megatron rolls labels at the ends without padding. Pass the padded "
            "boundaries as cu_seqlens_q and cu_seqlens_kv, too, and a loss_mask of 0 for padding: causal attention "
            "then gives the losses of documents without padding"
        )


def dispatch_batch(
    batch: dict[str, Any],
    cu_seqlens: Any = None,
    *,
    cp_group: Any = None,
    over_data: bool = False,
    multiple_of: int = 1,
) -> tuple[dict[str, Any], TreePackedSeqParams]:
    """This rank's share of a packed batch, with short documents whole on one rank; no document needs padding.

    Replaces Megatron's `get_thd_batch_on_this_cp_rank`, for a model that went through `use_dispatched_documents`. All
    ranks of cp_group pass the whole batch. Ranks have different numbers of documents' tokens, so the loss is right with
    `calculate_per_token_loss`.

    Args:
        batch: tensors [1, t]; tokens, labels, loss_mask and position_ids are cut (padding rows get 0), others are
            returned as they are. Missing position_ids are made; those of multimodal rotary embeddings are [3, 1, t].
            Or prefix_tree, a `PrefixTree`, instead of these: loss_mask then has the labels' weights.
        cu_seqlens: int32 [n + 1], from 0 to t: boundaries of the documents, without padding. Not for a prefix_tree.
        cp_group: the ranks that share this batch, a process group or 1-D DeviceMesh; default: Megatron's
            context-parallel group. With another one, such as all data- and context-parallel ranks, attention and
            recurrent layers of this batch run over those.
        over_data: the batch is that of a data-parallel rank. The batches of all of them are gathered, and dispatched
            over all data- and context-parallel ranks of Megatron's parallel state. Collective.
        multiple_of: each rank's rows are a multiple of this and of 2; with sequence parallelism the tensor-parallel
            size.
    Returns: the batch, and the `packed_seq_params` to call the model with.
    Raises: ValueError for bad boundaries, tensors of another length, and over_data with a cp_group.
    """
    if batch.get("prefix_tree") is not None:
        return _dispatch_tree(batch, cu_seqlens, cp_group, over_data, math.lcm(2, multiple_of))
    if cu_seqlens is None:
        raise ValueError("cu_seqlens is missing: pass the documents' boundaries, or a batch with a prefix_tree")
    tensors = {name: batch[name] for name in SHARDED if batch.get(name) is not None}
    if not tensors:
        raise ValueError(f"batch has entries {sorted(batch)}: one of {', '.join(SHARDED)} is needed")
    if over_data and cp_group is not None:
        raise ValueError("over_data=True takes all data- and context-parallel ranks: leave cp_group out")
    if over_data:
        of_data, cp_group = compat.data_groups()
        tensors, cu_seqlens = _gathered(tensors, document_bounds("cu_seqlens", cu_seqlens), of_data)
    group = compat.context_parallel_group() if cp_group is None else comm.process_group(cp_group)
    layout = dispatch_documents(cu_seqlens, group, multiple_of=math.lcm(2, multiple_of))
    device = next(iter(tensors.values())).device
    positions = document_positions(layout, comm.group_rank(group), comm.group_size(group), device=device)
    share = {name: shard_sequence(x, group, -1, layout, padding=SHARDED[name]) for name, x in tensors.items()}
    share.setdefault("position_ids", positions[None])
    return {**batch, **share}, TreePackedSeqParams.of(layout, positions, device, group)


def _gathered(
    tensors: dict[str, Tensor], bounds: tuple[int, ...], group: Any
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Tensors [..., 1, t] of packed documents and their boundaries: of all ranks in a line. Collective."""
    ranks = comm.Ranks.of(group, next(iter(tensors.values())).device)
    with ranks.call("dispatch_batch") as call:
        for name, x in tensors.items():
            if x.shape[-2:] != (1, bounds[-1]) or (x.dim() > 2 and name != "position_ids"):
                raise ValueError(f"{name} has the shape {list(x.shape)}: cu_seqlens gives [1, {bounds[-1]}]")
        call.agree(**{name: (x.dtype, x.shape[:-1]) for name, x in tensors.items()})
        lengths = torch.tensor(bounds, device=ranks.device).diff()
        sizes = lengths.new_tensor([[len(lengths), bounds[-1]]])
        num_documents, num_tokens = ranks.gather(sizes).T.tolist()
        lengths = ranks.gather_rows(lengths, num_documents)
        gather = functools.partial(ranks.gather_rows, counts=num_tokens)
        whole = {name: gather(x.movedim(-1, 0).contiguous()).movedim(0, -1) for name, x in tensors.items()}
    return whole, (0, *itertools.accumulate(lengths.tolist()))


def _dispatch_tree(
    batch: dict, cu_seqlens: Any, cp_group: Any, over_data: bool, multiple_of: int
) -> tuple[dict, TreePackedSeqParams]:
    """`dispatch_batch` of a prefix tree; its labels are the next tokens already."""
    tree = batch["prefix_tree"]
    group = compat.context_parallel_group() if cp_group is None else comm.process_group(cp_group)
    given = sorted({*batch} & {*SHARDED}) + ([] if cu_seqlens is None else ["cu_seqlens"])
    given += ["over_data=True"] if over_data else []
    if given or not isinstance(tree, PrefixTree):
        raise ValueError(
            f"prefix_tree is a {type(tree).__name__}, beside {given}: it must be what prefix_tree(rows) returned, and "
            "takes none of these"
        )
    layout = dispatch_prefix_tree(tree, group, multiple_of=multiple_of)
    labels = torch.zeros_like(tree.input_ids)  # also where they have weight 0: tokens before may predict them, too
    followed = F.pad(tree.row_index[:, 1:] >= 0, (0, 1))
    labels[:, tree.row_index[followed]] = tree.input_ids[:, tree.row_index[followed.roll(1, 1)]]
    tensors = dict(tokens=tree.input_ids, labels=labels, loss_mask=tree.weights, position_ids=tree.position_ids)
    share = {name: shard_sequence(x, group, 1, layout) for name, x in tensors.items()}
    packed = TreePackedSeqParams.of(layout, share["position_ids"][0], labels.device, group)
    packed.prefix_tree, packed.num_tokens = tree, max(1, int(followed.sum()))
    packed.times = shard_sequence(tree.sum_of_rows(followed.float()), group, 1, layout)
    return {**{name: x for name, x in batch.items() if name != "prefix_tree"}, **share}, packed


def use_dispatched_documents(model: Any) -> Any:
    """Let a model take the batches of `dispatch_batch`; call it once, after the model is built.

    With Megatron-LM's `--dataloader-inter-document-masking` the model then also takes that option's batches, which are
    cut zigzag as a whole.

    Args:
        model: a GPTModel or MambaModel with tree attention, also wrapped, or a list of model chunks. It is changed.
    Returns: the model.
    Raises: ValueError for recurrent layers whose cp_comm_type has no tree, which need documents cut one by one.
    """
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        for module in chunk.modules():
            _refuse(module)
        watch_batches(chunk)
    return model


def watch_batches(model: Any) -> None:
    """`use_dispatched_documents` for a model that may never get such a batch: it is checked at its first one."""
    for owner in compat.modules_with("roll_tensor"):
        if not isinstance(owner.roll_tensor, _RollByLayout):
            owner.roll_tensor = _RollByLayout(owner.roll_tensor)
    for module in model.modules():
        embedding = getattr(module, "rotary_pos_emb", None)
        if isinstance(embedding, torch.nn.Module) and not isinstance(embedding.forward, _LaidOutEmbedding):
            embedding.forward = _LaidOutEmbedding(embedding, compat.context_parallel_group(module))
        if hasattr(module, "decoder") or isinstance(embedding, torch.nn.Module):
            _tell_embedding(module)


def _refuse(module: Any, packed: TreePackedSeqParams | None = None) -> None:
    refused, cut_as_a_whole = None, packed is not None and packed.positions is None
    if compat.is_recurrent(module) and not getattr(module, "has_tree", False):
        refused = f"{type(module).__name__} (a layer with a recurrent state, and a cp_comm_type without a tree)"
    elif cut_as_a_whole and getattr(module, "position_embedding_type", None) == "mrope":
        refused = "position_embedding_type='mrope'"
    if refused:
        raise ValueError(
            f"{refused} needs packed documents that are cut one by one: use Megatron's own packed batches "
            "(get_thd_batch_on_this_cp_rank), without --dataloader-inter-document-masking"
        )


def _check_tree(model: Any, tree: PrefixTree, labels: Any, loss_mask: Any) -> None:
    """Raise a ValueError for positions that a tree has not, and where multi-token prediction would miss its labels or
    their weights."""
    if getattr(model, "position_embedding_type", None) == "mrope":
        raise ValueError(
            f"{type(model).__name__} has multimodal positions (position_embedding_type='mrope'): it takes no "
            "prefix_tree. Pack the rows as documents (dispatch_batch with cu_seqlens)"
        )
    number = getattr(getattr(model, "config", None), "mtp_num_layers", None) or 0
    if tree.num_predicted <= number:
        raise ValueError(
            f"mtp_num_layers={number}, and a prefix_tree with num_predicted={tree.num_predicted}: rows would share "
            f"tokens after which they part too soon. Call prefix_tree(rows, num_predicted={1 + number})"
        )
    if number and labels is not None and not (isinstance(loss_mask, Tensor) and loss_mask.is_floating_point()):
        raise ValueError(
            f"mtp_num_layers={number}, and a prefix_tree whose loss_mask the model has not got as floating-point "
            "numbers: pass loss_mask=batch['loss_mask'], the weights of the labels, to the model"
        )


class _RollByLayout:
    """Megatron's `roll_tensor`, by which tokens, labels and loss mask move forward for multi-token prediction; of a
    batch with a layout by that. Where rows of a prefix tree part, the tokens after a shared one are the same, and its
    weight is the sum of theirs."""

    def __init__(self, roll_tensor: Any):
        self._roll_tensor = roll_tensor

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        packed = kwargs.get("packed_seq_params")
        if not isinstance(packed, TreePackedSeqParams):
            return self._roll_tensor(tensor, *args, **kwargs)
        group = compat.group_of_batch(packed, kwargs.get("cp_group"))
        options = dict(cp_group=group, layout=packed.layout, sums=tensor.is_floating_point())
        rolled = tree_shift(tensor.flatten(0, -2), **options).view_as(tensor)
        total = rolled.sum()
        return rolled, total + (total == 0)  # Megatron divides by it, also on a rank that has a prompt's tokens only


class _LaidOutEmbedding:
    """The forward of a rotary embedding that puts each row of `packed` where Megatron will look for it."""

    def __init__(self, embedding: torch.nn.Module, group: Any):
        self._forward, self._group = embedding.forward, group
        self.packed: TreePackedSeqParams | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.packed is None or self.packed.positions is None:
            return self._forward(*args, **kwargs)
        if isinstance(args[0], Tensor):  # multimodal: positions, whose table is cut zigzag
            if args[0].dim() != 3:
                raise ValueError(
                    f"position_ids {list(args[0].shape)}: multimodal rotary embeddings (mrope) need those of time, "
                    "height and width, [3, 1, t] in the batch for dispatch_batch"
                )
            kwargs["cp_group"] = self._group
            return self._lay_out(self._forward(self._lay_out(args[0], 2), *args[1:], **kwargs), 0)
        result = self._forward(*args, **kwargs)
        table, *rest = result if isinstance(result, tuple) else (result,)
        laid_out = self._lay_out(table[self.packed.positions], 0)
        return (laid_out, *rest) if isinstance(result, tuple) else laid_out

    def _lay_out(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows in a sequence that is cut zigzag; the others' are 0."""
        world, rank, n = comm.group_size(self._group), comm.group_rank(self._group), x.shape[dim]
        rows = shard_positions(world * n, rank, world, device=x.device)
        return x.new_zeros(*x.shape[:dim], world * n, *x.shape[dim + 1 :]).index_copy_(dim, rows, x)


def _tell_embedding(module: Any) -> None:
    """Tell the module's rotary embedding, before every forward, which batch it is for."""
    signature = inspect.signature(type(module).forward)

    def before(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        call = signature.bind(module, *args, **kwargs)
        packed = _cut_as_a_whole(call.arguments.get("packed_seq_params"))
        embedding = getattr(module, "rotary_pos_emb", None)
        if isinstance(embedding, torch.nn.Module):
            embedding.forward.packed = packed
        if packed is None:
            return None
        _refuse(module, packed)
        if packed.prefix_tree is not None:
            _check_tree(module, packed.prefix_tree, *map(call.arguments.get, ("labels", "loss_mask")))
        packed.embedded = True
        packed.show_to(compat.context_parallel_group(module))
        call.arguments["packed_seq_params"] = packed
        return call.args[1:], call.kwargs

    module.register_forward_pre_hook(before, with_kwargs=True)


def _cut_as_a_whole(packed: Any) -> TreePackedSeqParams | None:
    """A batch that is not cut document by document; one of inter-document masking gets its layout here."""
    if packed is None or isinstance(packed, TreePackedSeqParams):
        return packed
    if not compat.cuts_packed_rows_as_a_whole():
        return None
    documents = packed_layout(packed.cu_seqlens_q)
    layout = documents_over(documents.lengths, documents.padded, comm.group_size(compat.context_parallel_group()))
    return TreePackedSeqParams.of(layout, None, packed.cu_seqlens_q.device)
