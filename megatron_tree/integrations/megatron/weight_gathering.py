"""Prefill of a served GPTModel in which every tensor-parallel rank runs its share of a chunk with gathered weights.

See `cache.weight_gathering`. Megatron's projections hold a part of the weights and reduce or gather results over the
ranks. In a gathering pass a projection is a plain product: with whole weights or, in an MLP whose tokens move, with
this rank's part of them. Experts stay where they are; Megatron's dispatchers take the tokens that each rank has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.attention.shares import count_tokens
from ...core.cache.gathered import Parts, Piece
from ...core.cache.weight_gathering import SplitFeedForward, SplitLayer, WeightGathering, current_pass
from ...core.comm import Ranks
from ...core.log import say_once
from . import compat
from .attention import serving

BY_ROWS = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj")
BY_ROWS += ("linear_kv_up_proj", "linear_fc1")
BY_COLUMNS = ("linear_proj", "linear_fc2")


def weight_gathering_of(model: Any, ranks: Ranks, head_groups: int) -> WeightGathering | None:
    """The WeightGathering of a GPTModel; None if it has tensor-parallel weights of an unknown kind.

    ranks: the tensor-parallel ones.
    """
    config, width, sizes, layers = model.config, next(model.parameters()).dtype.itemsize, [], []
    for i, layer in enumerate(model.decoder.layers):
        name, attention, mlp = f"decoder.layers.{i}", [], []
        for inside, module in layer.named_modules():
            parts = _parts_of(f"{name}.{inside}", module, config, ranks.size)
            (mlp if hasattr(layer.mlp, "linear_fc1") and inside.startswith("mlp.") else attention).extend(parts)
        if hasattr(layer.self_attention, "core_attention"):
            sizes += _sizes_of(layer.self_attention, config)
        feed_forwards = (SplitFeedForward(f"{name}.mlp", layer.mlp.linear_fc2, tuple(mlp)),) if mlp else ()
        layers.append(SplitLayer(name, tuple(attention), feed_forwards))
    known = {parts.name for layer in layers for weights in layer.weights for parts in weights}
    if unknown := [name for name, parameter in model.named_parameters() if _is_other(name, parameter, known)]:
        say_once(f"MegatronRunner: every rank runs all tokens of a prompt, since {unknown[0]} can't be gathered")
        return None
    heads, latents = config.num_attention_heads + config.num_query_groups, 0
    if config.multi_latent_attention:
        latents = sum(p.shape[0] for layer in layers for p in layer.attention if "_down_proj" in p.name)
    return WeightGathering(
        model,
        ranks,
        layers,
        model.output_layer,
        module_sizes=sizes,
        head_groups=head_groups,
        hidden=config.hidden_size * width,
        heads=2 * heads * config.kv_channels * width,
        gathered=latents * width,
        experts=sum(_dispatched_bytes(layer.mlp, config, width) for layer in model.decoder.layers),
        dim=0,
    )


def add_gathering(model: Any) -> None:
    """Wrap the forwards of a GPTModel's projections, experts and embedding; they change in gathering passes only."""
    for name, module in model.decoder.named_modules():
        if _projection(name):
            module.forward = functools.partial(_project, module, module.forward, model.config)
        elif _has_experts(module):
            module.forward = functools.partial(_dispatch, module.forward)
    table = model.embedding.word_embeddings
    table.forward = functools.partial(_embed, table, table.forward)


def _projection(name: str) -> str | None:
    """The last part of a module's name, if it is a projection of attention, an MLP or shared experts."""
    *path, last = name.split(".")
    return last if last in (*BY_ROWS, *BY_COLUMNS) and "experts" not in path else None


def _is_other(name: str, parameter: Tensor, known: set[str]) -> bool:
    """Whether a layer's parameter is tensor-parallel, unknown to `_parts_of`, and not of routed experts."""
    parallel = name.startswith("decoder.") and getattr(parameter, "tensor_model_parallel", False)
    whole = "_down_proj." in name  # TransformerEngine calls those parallel, too
    return parallel and not whole and name not in known and "experts" not in name.split(".")


def _has_experts(module: nn.Module) -> bool:
    return hasattr(module, "token_dispatcher")


def _parts_of(name: str, module: nn.Module, config: Any, world: int) -> list[Parts]:
    """How the ranks hold the parameters of a module itself."""
    if name.endswith(".core_attention") and isinstance(module.softmax_offset, nn.Parameter):
        return [_parts(f"{name}.softmax_offset", module.softmax_offset, 0, world)]
    last = _projection(name)
    if last is None or (last.endswith("_down_proj") and len(module.weight) == _latent_width(last, config)):
        return []  # TransformerEngine's projections to latents are whole on every rank
    if last in BY_COLUMNS:
        return [_parts(f"{name}.weight", module.weight, 1, world)]  # their biases are whole
    split = {"weight": module.weight} | ({} if _bias(module) is None else {"bias": module.bias})
    halves = 1 + (last == "linear_fc1" and config.gated_linear_unit)
    return [_parts(f"{name}.{x}", parameter, 0, world, halves) for x, parameter in split.items()]


def _parts(name: str, local: Tensor, dim: int, world: int, halves: int = 1) -> Parts:
    """A parameter that is split along dim; halves: 2 if a rank holds two pieces of it, gates and inputs."""
    n = local.shape[dim] // halves
    pieces = [Piece(dim, tuple(((i * world + r) * n, (i * world + r + 1) * n) for i in range(halves)))
              for r in range(world)]  # fmt: skip
    return Parts.of(name, torch.Size((*local.shape[:dim], halves * world * n, *local.shape[dim + 1 :])), pieces)


def _latent_width(last: str, config: Any) -> int:
    return config.q_lora_rank if last == "linear_q_down_proj" else config.kv_lora_rank + config.qk_pos_emb_head_dim


def _sizes_of(attention: nn.Module, config: Any) -> list[tuple[object, str, object, object]]:
    """The sizes that attention keeps, for `module_sizes` of `WeightGathering`."""
    whole = {"num_attention_heads_per_partition": config.num_attention_heads, "world_size": 1}
    whole["num_query_groups_per_partition"] = config.num_query_groups
    names = filter(functools.partial(hasattr, attention), whole)  # older releases have no world_size
    sizes = [(attention, name, whole[name], getattr(attention, name)) for name in names]
    sinks = (core := attention.core_attention).softmax_offset
    if sinks is not None and not isinstance(sinks, nn.Parameter):  # all of them are 0
        sizes.append((core, "softmax_offset", sinks.new_zeros(config.num_attention_heads), sinks))
    return sizes


def _dispatched_bytes(module: nn.Module, config: Any, width: int) -> float:
    """Bytes that a rank sends for one of its tokens, to the experts and back."""
    if not _has_experts(module):
        return 0
    of_weights, of_experts = config.expert_tensor_parallel_size or 1, config.expert_model_parallel_size
    copies = of_weights * of_experts - 1
    if config.moe_token_dispatcher_type != "allgather":
        copies = config.moe_router_topk * (1 - 1 / of_experts + of_weights - 1)
    return 2 * copies * config.hidden_size * width


def _bias(module: nn.Module) -> Tensor | None:
    """TransformerEngine's modules have an empty one if they have none."""
    return None if module.bias is None or not module.bias.numel() else module.bias


def _project(module: nn.Module, forward, config: Any, x: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
    if (gathering := current_pass.get()) is None:
        return forward(x, *args, **kwargs)
    bias, out = _bias(module), F.linear(compat.normed_input(module, x, config), module.weight)
    out = gathering.sum_up(module, out)
    if bias is None or getattr(module, "skip_bias_add", False) or getattr(module, "te_return_bias", False):
        return out, bias
    return out + bias, None


def _dispatch(forward, hidden: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
    served = serving.get()
    if served is None or served.forward.shares is None:
        return forward(hidden, *args, **kwargs)
    most = max(map(count_tokens, served.forward.shares))
    padded = F.pad(hidden, (0, 0, 0, 0, 0, most - len(hidden)))  # dispatchers gather equal numbers of tokens
    out, bias = forward(padded, *args, **kwargs)
    return out[: len(hidden)], bias


def _embed(table: nn.Module, forward, ids: Tensor) -> Tensor:
    if (gathering := current_pass.get()) is None:
        return forward(ids)
    local = table.vocab_start_index, table.vocab_end_index
    return gathering.look_up(lambda rows: F.embedding(rows, table.weight), ids, *local, table.num_embeddings)
