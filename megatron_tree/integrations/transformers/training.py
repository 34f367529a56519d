"""Training Transformers models on sharded sequences: the batch, the attention, and the loss over all ranks.

    train_on_shards(model)                                  # attn_implementation="tree", and the loss below
    loss = model(**shard_batch(batch, cp_group=group)).loss

Every rank of cp_group passes the whole batch and runs its own tokens through the whole network; only the attention
reads the other ranks' tokens. `shard_batch` adds a `SequenceShard` to the batch, which the attention of every layer
gets as its mask (`tree_mask`).

The loss is the mean over the tokens of *all* ranks, sequence- and data-parallel ones. Its gradient on a rank is that of
the rank's own tokens times the number of ranks, so the right gradient is the *average* over all ranks.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from transformers import PreTrainedModel

from ...attention.functional import tree_attn_func, tree_attn_varlen_func
from ...attention.sequences import dispatch_documents, shard_sequence
from ...comm import group_size, outside_graphs, process_group
from ...config import TreeConfig
from ...layout import Dispatched
from .architectures import CHUNKED, check_trainable
from .cache import TreeCache
from .loss import check_loss, loss_over_all_ranks
from .rope import follow_whole_rows, row_lengths
from .token_tiles import IGNORED, DeferredLogits, tile_loss, tile_mlps

BATCH_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")
OF_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # position_ids say the same


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceShard:
    """What the layers and the loss need to know about a batch made by `shard_batch`."""

    cp_group: object
    loss_group: object
    config: TreeConfig | None
    num_tokens: int
    """Rows of this rank's shard."""
    documents: Dispatched | None
    """Who holds what of a packed batch; None: one sequence per row, zigzag."""
    dropout_seed: str | None
    row_lengths: Tensor
    """int64 [b, 1] or [1, t / p]: tokens of each row or, if packed, of the document of each of this rank's tokens."""
    used_by: dict = field(default_factory=dict)
    """The layers that have used this shard, by number, with their windows; and "loss"."""


current_shard: contextvars.ContextVar[SequenceShard | None] = contextvars.ContextVar("tree_shard", default=None)
"""Of the batch that a model runs."""


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
    ids, labels, positions, lengths, ends = _checked(batch)
    packed = len(lengths) > 1
    rows, documents = _own_rows(lengths, cp_group, ids.device)

    def share(x: Tensor) -> Tensor:
        return (x.reshape(1, -1) if packed else x)[:, rows.clamp(min=0)]  # rows of padding are never read

    made = {"input_ids": share(ids), "position_ids": share(positions)}
    if labels is not None:
        shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        made["labels"] = share(shifted).masked_fill(rows < 0, IGNORED)
    shard = SequenceShard(
        cp_group=cp_group,
        loss_group=cp_group if loss_group is None else loss_group,
        config=tree_config,
        num_tokens=len(rows),
        documents=documents,
        dropout_seed=dropout_seed,
        row_lengths=share(ends) if packed else ends[:, :1],
    )
    # with a mask of ones Transformers does not read the shard's positions as packed documents
    return made | {"attention_mask": torch.ones_like(made["input_ids"]), "use_cache": False, "sequence_shard": shard}


def _checked(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor, list[int], Tensor]:
    """input_ids, labels, position_ids, all [b, s], the lengths of the documents ([s] unless packed), ends [b, s].

    ends: for every token the last position of its row (or document), without padding, plus one.
    """
    unknown = sorted(set(batch) - set(BATCH_KEYS) - set(OF_FLASH if batch.get("position_ids") is not None else ()))
    if unknown:
        raise ValueError(f"batch has {unknown}: only {', '.join(BATCH_KEYS)} can be sharded; leave the others out")
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or 0 in ids.shape or ids.dtype != torch.int64:
        seen = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"input_ids must be int64 [batch, tokens] with at least one token, got {seen}")
    labels, mask, positions = (batch.get(name) for name in BATCH_KEYS[1:])
    for name in set(batch) & {*BATCH_KEYS[1:]}:
        dtype = getattr(batch[name], "dtype", None)
        if batch[name] is not None and (dtype is None or (name != "attention_mask" and dtype != torch.int64)):
            raise ValueError(f"{name} must be an int64 tensor, got {dtype or type(batch[name]).__name__}")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)
    positions = positions.expand(ids.shape) if positions.dim() < 2 or positions.shape[0] == 1 else positions
    for name, x in (("labels", labels), ("attention_mask", mask), ("position_ids", positions)):
        if x is not None and x.shape != ids.shape:
            raise ValueError(f"{name} {list(x.shape)} must have the shape of input_ids, {list(ids.shape)}")
    begins = positions.diff(dim=1) != 1
    if mask is not None:
        mask = mask.bool()
        if (mask[:, 1:] & ~mask[:, :-1]).any() or not mask[:, 0].all():
            raise ValueError("attention_mask: padding must be on the right of every row, where no token sees it")
        if labels is not None and (labels[~mask] != IGNORED).any():
            raise ValueError(f"labels of padding (attention_mask 0) must be {IGNORED}")
        begins = begins & mask[:, 1:]
        if begins.any() and not mask.all():
            raise ValueError(
                "position_ids that start again (packed documents) can't be combined with an attention_mask that has "
                "padding: leave out the mask; packed documents need no padding"
            )
    if not begins.any():
        real = positions if mask is None else positions * mask
        return ids, labels, positions, [ids.shape[1]], (real.amax(1, keepdim=True) + 1).expand(ids.shape)
    starts = F.pad(begins, (1, 0), value=True).flatten().nonzero().flatten().tolist()
    lengths = [end - start for start, end in pairwise([*starts, ids.numel()])]
    if (told := batch.get("cu_seq_lens_q")) is not None and told.flatten().tolist() != [*starts, ids.numel()]:
        raise ValueError(f"cu_seq_lens_q={told.tolist()}, but documents in position_ids begin at {starts}")
    ends = torch.cat([part[-1:].expand(len(part)) for part in positions.flatten().split(lengths)]) + 1
    return ids, labels, positions, lengths, ends.view(ids.shape)


def _own_rows(lengths: list[int], cp_group, device) -> tuple[Tensor, Dispatched | None]:
    """int64 [t / p]: for each of this rank's rows its row in the whole batch, -1 for padding; the layout if packed."""
    whole = torch.arange(sum(lengths), device=device)
    if len(lengths) > 1:
        documents = dispatch_documents([0, *accumulate(lengths)], cp_group)
        return shard_sequence(whole, cp_group, 0, documents, padding=-1), documents
    parts = 2 * group_size(cp_group) if group_size(cp_group) > 1 else 1
    return shard_sequence(F.pad(whole, (0, -len(whole) % parts), value=-1), cp_group, 0), None


def attend_to_shard(
    module, q: Tensor, k: Tensor, v: Tensor, *, shard: SequenceShard, dropout: float, options: dict
) -> Tensor:
    """Attention of this rank's tokens over the whole sequence: q [b, s / p, h, d] -> [b, s / p, h, d_v]. Collective."""
    name = f"{type(module).__name__} (layer_idx={module.layer_idx})"
    if not q.shape[1] == k.shape[1] == shard.num_tokens:
        raise ValueError(
            f"{name} got {q.shape[1]} queries and {k.shape[1]} keys, but the shard has {shard.num_tokens} tokens: "
            "pass everything that shard_batch returned, and nothing else, to the model"
        )
    options = {**options, "cp_group": shard.cp_group, "config": shard.config}
    if dropout:
        if shard.dropout_seed is None:
            raise ValueError(
                f"{name}: attention dropout={dropout} needs a dropout_seed that is new for every batch, for instance "
                "the batch's number"
            )
        options |= {"dropout_p": dropout, "dropout_seed": _seed(shard.dropout_seed, module.layer_idx)}
    window = options.get("window_size", (-1, -1))[0]
    shard.used_by[module.layer_idx] = None if window == -1 else window + 1
    if shard.documents is None:
        return tree_attn_func(q, k, v, causal=True, layout="zigzag", **options)
    return tree_attn_varlen_func(q[0], k[0], v[0], causal=True, layout=shard.documents, **options)[None]


def _seed(seed: str, layer_idx: int) -> int:
    """A different seed for every layer: 0 <= seed < 2**63."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{layer_idx}".encode(), digest_size=8).digest(), "big") >> 1


def train_on_shards(
    model: PreTrainedModel, *, loss_tile: int | None = None, mlp_tile: int | None = None
) -> list[nn.Module]:
    """Make a decoder-only causal language model train on batches from `shard_batch`. No communication.

    Sets the attention implementation "tree" and the loss `loss_over_all_ranks`. The model is then trained on no other
    batches; in evaluation (`model.eval()`) it also takes plain ones, which this rank runs alone, and a `TreeCache`.
    A second call for the same model changes nothing.

    Args:
        loss_tile: tokens whose logits are computed at a time; 0: all. Default: as many as give 256 MiB, if a shard has
            more. The model's output has no logits then.
        mlp_tile: tokens that the MLPs compute at a time, and once more in the backward. Default: all.
    Returns: the MLPs that are tiled.
    Raises: ValueError for a model whose layers, attention or loss don't work on shards, and tiles that it can't have.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}: pass the Transformers model itself (PreTrainedModel), of a PeftModel "
            "its get_base_model(); torch.compile it afterwards"
        )
    windows = check_trainable(model.config)
    text = model.config.get_text_config(decoder=True)
    if text.model_type in CHUNKED:
        raise ValueError(f"{type(model).__name__} has chunked_attention layers: it can't be trained on shards")
    check_loss(model, getattr(model, "loss_on_shards", ForCausalLMLoss))
    if getattr(text, "layerdrop", 0.0):
        raise ValueError(f"layerdrop={text.layerdrop}: ranks would leave out different layers; set it to 0")
    if getattr(text, "num_layers_per_stack", None) and text.attention_dropout:
        raise ValueError(
            f"attention_dropout={text.attention_dropout}: {type(model).__name__} runs every layer several times, which "
            "would get the same mask each time; set it to 0"
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} counts positions from its padding token's number, not from 0, and over the tokens "
            "of a batch: it can't be trained on shards"
        )
    model.set_attn_implementation("tree")
    if text._attn_implementation != "tree":
        raise ValueError(f"{type(model).__name__} does not let its attention be replaced (AttentionInterface)")
    if getattr(model, "trains_on_shards", False):
        return []
    tiled, mlps = tile_loss(model, loss_tile), tile_mlps(model, mlp_tile)
    model.loss_on_shards = functools.partial(loss_over_all_ranks, plain_loss=model.loss_function)
    model.loss_function = model.loss_on_shards
    model.trains_on_shards, model.tiled_loss = windows, tiled
    follow_whole_rows(model)
    model.register_forward_pre_hook(outside_graphs(_check_call), with_kwargs=True)
    model.register_forward_hook(outside_graphs(_check_use), with_kwargs=True)
    model.register_forward_hook(outside_graphs(_end_call), always_call=True)
    return mlps


def _check_call(model, args, kwargs) -> None:
    plain = kwargs.get("sequence_shard") is None and not isinstance(kwargs.get("past_key_values"), TreeCache)
    if plain and model.training:
        raise ValueError(
            f"this {type(model).__name__} trains on shards: call it with the result of shard_batch, or with "
            "past_key_values=TreeCache(model.config, ...); model.eval() takes other batches, too"
        )
    if kwargs.get("sequence_shard") is not None:
        check_loss(model, model.loss_on_shards, kwargs.get("output_router_logits"))
        current_shard.set(kwargs["sequence_shard"])
        row_lengths.set(kwargs["sequence_shard"].row_lengths)
        if model.tiled_loss is not None and kwargs.get("labels") is not None:
            model.tiled_loss.begin(kwargs["labels"].numel())


def _end_call(model, args, output):
    current_shard.set(None)
    row_lengths.set(None)
    if model.tiled_loss is not None:
        model.tiled_loss.end()
    if isinstance(output, ModelOutput) and isinstance(output.get("logits"), DeferredLogits):
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
    return None


def _check_use(model, args, kwargs, output) -> None:
    shard = kwargs.get("sequence_shard")
    if shard is None:
        return
    expected = model.trains_on_shards | ({"loss": None} if kwargs.get("labels") is not None else {})
    if missing := sorted(map(str, set(expected) - set(shard.used_by))):
        raise ValueError(
            f"{type(model).__name__} does not pass its mask on to {', '.join(missing)} (layers by number): it can't be "
            "trained on shards"
        )
    if others := {layer: window for layer, window in shard.used_by.items() if window != expected.get(layer)}:
        raise ValueError(
            f"{type(model).__name__} attends with the windows {others} (layers by number), but its configuration says "
            f"{ {layer: expected.get(layer) for layer in others} }: it can't be trained on shards"
        )
