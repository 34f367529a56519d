"""Chunks of a prompt in which every tensor-parallel rank of a served GPTModel runs its own tokens.

See `cache.weight_gathering`. Megatron's projections have a part of the weights, and add up or gather results over the
ranks; in such a run a projection is a plain product, with whole weights or, in an MLP whose tokens move, with its part
of them. Experts stay where they are: Megatron's dispatchers take the tokens that each rank has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.token_shares import count_tokens
from ...cache.gathered import Parts, Piece
from ...cache.weight_gathering import SplitFeedForward, SplitLayer, WeightGathering, current_pass
from ...log import say_once
from . import compat
from .attention import serving

BY_ROWS = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj")
BY_ROWS += ("linear_kv_up_proj", "linear_fc1")
BY_COLUMNS = ("linear_proj", "linear_fc2")


def own_tokens_of(model: Any, group: Any, head_groups: int, **wire) -> WeightGathering | None:
    """What runs of own tokens of a GPTModel need; None if a layer has tensor-parallel weights of another kind.

    group: the tensor-parallel ranks.
    """
    config, width, numbers, layers = model.config, next(model.parameters()).dtype.itemsize, [], []
    for i, layer in enumerate(model.decoder.layers):
        name, attention, block = f"decoder.layers.{i}", [], []
        for inside, module in layer.named_modules():
            parts = _parts_of(f"{name}.{inside}", module, config, group.size())
            (block if _is_mlp(layer.mlp) and inside.startswith("mlp.") else attention).extend(parts)
        if hasattr(layer.self_attention, "core_attention"):
            numbers += _own_numbers(layer.self_attention, config)
        blocks = (SplitFeedForward(f"{name}.mlp", layer.mlp.linear_fc2, tuple(block)),) if block else ()
        layers.append(SplitLayer(name, tuple(attention), blocks))
    known = {parts.name for layer in layers for of_part in layer.weights for parts in of_part}
    if unknown := [name for name, parameter in model.named_parameters() if _is_other(name, parameter, known)]:
        say_once(f"MegatronRunner: every rank runs all tokens of a prompt, since {unknown[0]} can't be gathered")
        return None
    heads, latents = config.num_attention_heads + config.num_query_groups, 0
    if config.multi_latent_attention:
        latents = sum(p.shape[0] for layer in layers for p in layer.attention if "_down_proj" in p.name)
    return WeightGathering(
        model,
        group,
        layers,
        model.output_layer,
        module_sizes=numbers,
        head_groups=head_groups,
        hidden=config.hidden_size * width,
        heads=2 * heads * config.kv_channels * width,
        gathered=latents * width,
        experts=sum(_dispatched_bytes(layer.mlp, config, width) for layer in model.decoder.layers),
        dim=0,
        **wire,
    )


def run_own_tokens(model: Any) -> None:
    """Change a GPTModel's modules for such runs; outside of them they are what they were."""
    for name, module in model.decoder.named_modules():
        if _projection(name):
            module.forward = functools.partial(_projected, module, module.forward, model.config)
        elif _has_experts(module):
            module.forward = functools.partial(_dispatched, module.forward)
    table = model.embedding.word_embeddings
    table.forward = functools.partial(_looked_up, table, table.forward)


def _projection(name: str) -> str | None:
    """The last part of a module's name, if it is a projection of attention, an MLP or shared experts."""
    *path, last = name.split(".")
    return last if last in (*BY_ROWS, *BY_COLUMNS) and "experts" not in path else None


def _is_other(name: str, parameter: Tensor, known: set[str]) -> bool:
    """Whether a tensor-parallel parameter of a layer is none that `_parts_of` knows, nor the routed experts'."""
    parallel = name.startswith("decoder.") and getattr(parameter, "tensor_model_parallel", False)
    whole = "_down_proj." in name  # TransformerEngine calls those parallel, too
    return parallel and not whole and name not in known and "experts" not in name.split(".")


def _is_mlp(module: nn.Module) -> bool:
    return hasattr(module, "linear_fc1")


def _has_experts(module: nn.Module) -> bool:
    return hasattr(module, "token_dispatcher")


def _parts_of(name: str, module: nn.Module, config: Any, world: int) -> list[Parts]:
    """What the ranks contribute of a module's own parameters."""
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


def _parts(name: str, own: Tensor, dim: int, world: int, halves: int = 1) -> Parts:
    """Of a parameter that is split along dim; halves: 2 if a rank has two runs of it, gates and inputs."""
    n = own.shape[dim] // halves
    pieces = [Piece(dim, tuple(((i * world + r) * n, (i * world + r + 1) * n) for i in range(halves)))
              for r in range(world)]  # fmt: skip
    return Parts.of(name, torch.Size((*own.shape[:dim], halves * world * n, *own.shape[dim + 1 :])), pieces)


def _latent_width(last: str, config: Any) -> int:
    return config.q_lora_rank if last == "linear_q_down_proj" else config.kv_lora_rank + config.qk_pos_emb_head_dim


def _own_numbers(attention: nn.Module, config: Any) -> list[tuple[object, str, object, object]]:
    """What attention knows of its heads, see `WeightGathering`."""
    whole = {"num_attention_heads_per_partition": config.num_attention_heads, "world_size": 1}
    whole["num_query_groups_per_partition"] = config.num_query_groups
    names = filter(functools.partial(hasattr, attention), whole)  # older releases have no world_size
    found = [(attention, name, whole[name], getattr(attention, name)) for name in names]
    sinks = (core := attention.core_attention).softmax_offset
    if sinks is not None and not isinstance(sinks, nn.Parameter):  # all of them are 0
        found.append((core, "softmax_offset", sinks.new_zeros(config.num_attention_heads), sinks))
    return found


def _dispatched_bytes(module: nn.Module, config: Any, width: int) -> float:
    """What a rank sends of one of its tokens to experts, and of the results back."""
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


def _projected(module: nn.Module, forward, config: Any, x: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
    if (run := current_pass.get()) is None:
        return forward(x, *args, **kwargs)
    out, bias = run.sum_up(module, F.linear(compat.normed_input(module, x, config), module.weight)), _bias(module)
    if bias is None or getattr(module, "skip_bias_add", False) or getattr(module, "te_return_bias", False):
        return out, bias
    return out + bias, None


def _dispatched(forward, hidden: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
    served = serving.get()
    if served is None or served.forward.shares is None:
        return forward(hidden, *args, **kwargs)
    most = max(map(count_tokens, served.forward.shares))
    padded = F.pad(hidden, (0, 0, 0, 0, 0, most - len(hidden)))  # dispatchers gather as many tokens of every rank
    out, bias = forward(padded, *args, **kwargs)
    return out[: len(hidden)], bias


def _looked_up(table: nn.Module, forward, ids: Tensor) -> Tensor:
    if (run := current_pass.get()) is None:
        return forward(ids)
    own = table.vocab_start_index, table.vocab_end_index
    return run.look_up(lambda found: F.embedding(found, table.weight), ids, *own, table.num_embeddings)
