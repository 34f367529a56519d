"""The same weights under the names and in the layouts of Transformers and of Megatron's GPTModel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Parameters of GPTModel and the tensors of Transformers that they are made of; {} is the number of a layer.
NAMES = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.layers.{}.input_layernorm.weight": ("model.layers.{}.input_layernorm.weight",),
    "decoder.layers.{}.self_attention.linear_proj.weight": ("model.layers.{}.self_attn.o_proj.weight",),
    "decoder.layers.{}.self_attention.q_layernorm.weight": ("model.layers.{}.self_attn.q_norm.weight",),
    "decoder.layers.{}.self_attention.k_layernorm.weight": ("model.layers.{}.self_attn.k_norm.weight",),
    "decoder.layers.{}.pre_mlp_layernorm.weight": ("model.layers.{}.post_attention_layernorm.weight",),
    "decoder.layers.{}.mlp.linear_fc1.weight": tuple(f"model.layers.{{}}.mlp.{x}_proj.weight" for x in ("gate", "up")),
    "decoder.layers.{}.mlp.linear_fc2.weight": ("model.layers.{}.mlp.down_proj.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
for _kind in ("weight", "bias"):
    _qkv = tuple(f"model.layers.{{}}.self_attn.{x}_proj.{_kind}" for x in "qkv")
    NAMES[f"decoder.layers.{{}}.self_attention.linear_qkv.{_kind}"] = _qkv


def from_transformers(parameter: str) -> tuple[str, ...]:
    """The tensors of Transformers that a parameter of GPTModel is made of: one, (gate, up) or (q, k, v)."""
    layer = re.search(r"(?<=\.layers\.)\d+", parameter)
    names = NAMES[re.sub(r"(?<=\.layers\.)\d+", "{}", parameter)]
    return tuple(name.format(layer[0] if layer else "") for name in names)


def joined(parts: list[Tensor], options: Mapping[str, Any]) -> Tensor:
    """One parameter of GPTModel from its tensors in Transformers.

    q, k and v [heads * d, ...] become groups of a KV head with its query heads: [groups, heads/groups + 2, d, ...].
    """
    if len(parts) < 3:
        return torch.cat(parts)
    groups = options["num_query_groups"]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def parted(weight: Tensor, options: Mapping[str, Any], count: int) -> list[Tensor]:
    """The inverse of `joined`, for `count` tensors."""
    if count < 3:
        return list(weight.chunk(count))
    groups, d = options["num_query_groups"], options["kv_channels"]
    rows = weight.unflatten(0, (groups, -1)).split([options["num_attention_heads"] // groups * d, d, d], 1)
    return [part.flatten(0, 1) for part in rows]


@torch.no_grad()
def fill(model: torch.nn.Module, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
    """Fill the parameters of a GPTModel with those of a Transformers model.

    Raises: ValueError for tensors that have no place in the model, or another shape.
    """
    left = set(tensors)
    if not options["untie_embeddings_and_output_weights"]:
        left.discard("lm_head.weight")
    for name, parameter in model.named_parameters():
        sources = from_transformers(name)
        if missing := [source for source in sources if source not in tensors]:
            raise ValueError(f"the weights lack {missing[0]}, which their configuration asks for")
        weight = joined([tensors[source] for source in sources], options)
        if weight.shape != parameter.shape:
            raise ValueError(f"{sources[0]} makes {tuple(weight.shape)}, but {name} has {tuple(parameter.shape)}")
        parameter.copy_(weight)
        left -= set(sources)
    if left:
        raise ValueError(f"{len(left)} tensors have no place in a GPTModel, for instance {min(left)}")


def tensors_of(model: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters of a GPTModel under Transformers' names, without the padding of the vocabulary."""
    tensors = {}
    for name, parameter in model.named_parameters():
        weight, sources = parameter.detach(), from_transformers(name)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            weight = weight[: options["vocab_size"]]
        for source, part in zip(sources, parted(weight, options, len(sources)), strict=True):
            tensors[source] = part.contiguous()
    return tensors
