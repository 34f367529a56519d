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

import functools
import hashlib
import inspect

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from transformers import PreTrainedModel

from ....core.attention.functional import tree_attn_func, tree_attn_varlen_func
from ....core.comm import forward_in_step, outside_graphs
from ....core.layout import PrefixTree
from ..architectures import attention_windows, size_of_blocks
from ..families.chunked import chunk_size, has_temperature, layout_in_chunks, with_temperature
from ..families.images import attend_to_images, with_image_positions
from ..families.mixers import find_mixers, run_on_shards
from ..families.rope import rope_rule, row_lengths
from ..families.table import families_of, patch_model
from ..infer.cache import TreeCache
from .batch_shards import SequenceShard, current_shard
from .loss import check_loss, loss_over_all_ranks
from .random_numbers import draw_by_rank
from .token_tiles import DeferredLogits, tile_loss, tile_mlps


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
        digest = hashlib.blake2b(f"{shard.dropout_seed}/{module.layer_idx}".encode(), digest_size=8).digest()
        options |= {"dropout_p": dropout, "dropout_seed": int.from_bytes(digest, "big") >> 1}  # below 2**63
    window = options.get("window_size", (-1, -1))[0]
    shard.used_by[module.layer_idx] = None if window == -1 else window + 1
    if has_temperature(module):
        q = with_temperature(module, q, shard.positions)
    chunk = chunk_size(module)
    if shard.prefix_tree is not None and "selected" not in options:
        del options["window_size"]
        ranges = shard.prefix_tree.ranges(shard.used_by[module.layer_idx], chunk)
        return tree_attn_func(q, k, v, ranges=ranges, layout=shard.documents, **options)
    if chunk is not None:
        return tree_attn_func(q, k, v, causal=True, layout=layout_in_chunks(shard.layout, chunk), **options)
    if shard.image_blocks:
        return attend_to_images(q, k, v, shard=shard, options=options)
    if shard.documents is None:
        return tree_attn_func(q, k, v, causal=True, layout="zigzag", **options)
    if (selected := options.pop("selected", None)) is not None:
        options["selected"] = selected[0]
    return tree_attn_varlen_func(q[0], k[0], v[0], causal=True, layout=shard.documents, **options)[None]


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
    windows, mixers = attention_windows(model.config), find_mixers(model)
    text = model.config.get_text_config(decoder=True)
    if "chunked" in families_of(text) and text.attention_dropout:
        raise ValueError(
            f"attention_dropout={text.attention_dropout}: in chunked layers, rows of a batch would share masks; set it "
            "to 0"
        )
    check_loss(model, getattr(model, "loss_on_shards", ForCausalLMLoss))
    if getattr(text, "layerdrop", 0.0):
        raise ValueError(f"layerdrop={text.layerdrop}: ranks would leave out different layers; set it to 0")
    if getattr(text, "num_layers_per_stack", None) and text.attention_dropout:
        raise ValueError(
            f"attention_dropout={text.attention_dropout}: {type(model).__name__} runs every layer several times, which "
            "would get the same mask each time; set it to 0"
        )
    model.set_attn_implementation(_of_text(model.config))
    if getattr(model, "trains_on_shards", False):
        return []
    tiled, mlps = tile_loss(model, loss_tile), tile_mlps(model, mlp_tile)
    model.loss_on_shards = functools.partial(loss_over_all_ranks, plain_loss=model.loss_function)
    model.loss_function = model.loss_on_shards
    model.trains_on_shards, model.tiled_loss = windows | run_on_shards(model, mixers), tiled
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            module.register_forward_pre_hook(_count_from_padding, with_kwargs=True)
    patch_model(model.config)
    forward_in_step(model, _groups_of, _is_over)
    model.register_forward_pre_hook(outside_graphs(_begin_call), with_kwargs=True)
    model.register_forward_hook(outside_graphs(_check_use), with_kwargs=True)
    model.register_forward_hook(outside_graphs(_end_call), always_call=True)
    draw_by_rank(model)
    return mlps


def _of_text(config) -> str | dict[str, str]:
    """The implementation "tree", of the text part alone if there is another one."""
    text = config.get_text_config(decoder=True)
    own = [name for name in config.sub_configs if getattr(config, name, None) is text]
    return {own[0]: "tree"} if own else "tree"


def _begin_call(model, args, kwargs) -> tuple | None:
    shard = kwargs.get("sequence_shard")
    plain = shard is None and not isinstance(kwargs.get("past_key_values"), TreeCache)
    if plain and model.training and torch.is_grad_enabled():
        raise ValueError(
            f"this {type(model).__name__} trains on shards: call it with the result of shard_batch, or with "
            "past_key_values=TreeCache(model.config, ...); model.eval() takes other batches, too"
        )
    if shard is None:
        return None
    check_loss(model, model.loss_on_shards, kwargs.get("output_router_logits"))
    _check_is_whole(model, shard, args, kwargs)
    if shard.prefix_tree is not None:
        _check_takes_tree(model, shard.prefix_tree)
    kwargs = with_image_positions(model, kwargs)
    shard.used_by.clear()
    current_shard.set(shard)
    row_lengths.set(shard.row_lengths)
    if model.tiled_loss is not None and kwargs.get("labels") is not None:
        model.tiled_loss.begin(kwargs["labels"].numel(), getattr(shard.token_values, "tile", None))
    return args, kwargs


def _check_takes_tree(model, tree: PrefixTree) -> None:
    """Raise ``ValueError`` for a model that can't compute rows that share tokens as one packed row."""
    text, reason = model.config.get_text_config(decoder=True), None
    dropout = getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0)
    lengths, rule, size = (tree.row_index >= 0).sum(1), rope_rule(text), size_of_blocks(model.config)
    if cut := next((branch.depth for branch in tree.branches if branch.depth % size), 0):
        raise ValueError(
            f"{type(model).__name__} has blocks of {size} tokens, and rows of the prefix_tree part after {cut}: call "
            f"prefix_tree(rows, block_size={size})"
        )
    if dropout and model.training:
        reason = f"attention dropout={dropout}, for which ranges have no mask (set it to 0)"
    elif rule is not None and len(rule.representatives(lengths).unique()) > 1:
        reason = f"a rotary embedding that differs for rows of {int(lengths.min())} and {int(lengths.max())} tokens"
    if reason:
        raise ValueError(
            f"{type(model).__name__} has {reason}: it takes no prefix_tree. Pass the rows one by one (input_ids), or "
            "packed one after another (position_ids that start again)"
        )


def _check_is_whole(model, shard: SequenceShard, args: tuple, kwargs: dict) -> None:
    """Raise ``ValueError`` unless the model gets every token of the shard."""
    given = dict(zip(list(inspect.signature(type(model).forward).parameters)[1:], args)) | kwargs
    shape = (1 if shard.whole.packed else shard.whole_shape[0], shard.num_tokens)
    tokens = "input_ids" if given.get("inputs_embeds") is None else "inputs_embeds"
    for_tokens = {name: given.get(name) for name in (tokens, "position_ids", "attention_mask", "labels")}
    wrong = {name: None if x is None else list(x.shape) for name, x in for_tokens.items() if not _fits(name, x, shape)}
    if wrong:
        raise ValueError(
            f"{type(model).__name__} got {wrong}, but the shard has {list(shape)} tokens: pass everything that "
            "shard_batch returned, as it is, to the model; cut or change the batch before"
        )
    kept = given.get("logits_to_keep", 0)
    if not isinstance(kept, int) or kept:
        raise ValueError(
            f"logits_to_keep={kept}: the last tokens of a shard are not those of its rows: leave it out. Labels of "
            "-100 leave tokens out of the loss, whose logits are computed some at a time (loss_tile)"
        )


def _fits(name: str, x: Tensor | None, shape: tuple[int, int]) -> bool:
    if x is None:
        return name == "labels"
    return (x.shape[:2] if name == "inputs_embeds" else x.shape[-2:]) == shape


def _count_from_padding(embeddings, args, kwargs) -> tuple | None:
    """These embeddings, RoBERTa's, give the first token the number after their padding token's."""
    if current_shard.get() is None:
        return None
    return args, kwargs | {"position_ids": kwargs["position_ids"] + embeddings.padding_idx + 1}


def _end_call(model, args, output):
    current_shard.set(None)
    row_lengths.set(None)
    if model.tiled_loss is not None:
        model.tiled_loss.end()
    if isinstance(output, ModelOutput) and isinstance(output.get("logits"), DeferredLogits):
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
    if isinstance(output, tuple):  # of return_dict=False
        return tuple(x for x in output if not isinstance(x, DeferredLogits))
    return None


def _groups_of(kwargs: dict) -> tuple:
    """The ranks that a forward of a shard has collectives with."""
    shard: SequenceShard | None = kwargs.get("sequence_shard")
    if shard is None:
        return ()
    with_loss = kwargs.get("labels") is not None and shard.token_values is None
    return (shard.cp_group, shard.loss_group) if with_loss else (shard.cp_group,)


def _is_over(kwargs: dict) -> bool:
    """Whether a forward of a shard has had all of its collectives."""
    shard: SequenceShard | None = kwargs.get("sequence_shard")
    return shard is not None and "loss" in shard.used_by


def _check_use(model, args, kwargs, output) -> None:
    shard = kwargs.get("sequence_shard")
    if shard is None:
        return
    expected = model.trains_on_shards | ({"loss": None} if kwargs.get("labels") is not None else {})
    if missing := sorted(map(str, set(expected) - set(shard.used_by))):
        if (chosen := model.config.get_text_config(decoder=True)._attn_implementation) != "tree":
            raise ValueError(
                f"attn_implementation={chosen!r} of {type(model).__name__} attends to one rank's tokens of a shard: "
                "call model.set_attn_implementation('tree') before it gets shards again"
            )
        raise ValueError(
            f"{type(model).__name__} does not pass its mask on to {', '.join(missing)} (layers by number): it can't be "
            "trained on shards"
        )
    if others := {layer: window for layer, window in shard.used_by.items() if window != expected.get(layer)}:
        raise ValueError(
            f"{type(model).__name__} attends with the windows {others} (layers by number), but its configuration says "
            f"{ {layer: expected.get(layer) for layer in others} }: it can't be trained on shards"
        )
