"""Serve a Megatron-core GPTModel: decoding and prefill with a sharded KV cache.

The context-parallel ranks share the cache. Without context parallelism, the tensor-parallel ranks that have the same KV
head share it, if there are more ranks than KV heads: then all ranks share weights and cache.

    runner = MegatronRunner(model.eval())                # a GPTModel whose core attention is tree attention
    row = runner.add()
    logits = runner.prefill(row, prompt)                 # every rank runs its share of each chunk
    logits = runner.step([row], logits.argmax(-1).view(1, 1))

Megatron's inference contexts don't fit: static ones keep keys before their positions are applied, for rows of one
length; dynamic ones call flash-attn in place of core attention; neither knows context parallelism. So the model runs
without one, as in training, inside a `ServedPass`: core attention writes the new keys and values, with positions, to
the cache, and hooks pick the positions of this rank's tokens and the token whose logits are wanted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from ...core.cache import ShardedCache
from ...core.cache.forward import ForwardPass
from ...core.cache.latent import LatentHeads
from ...core.cache.runner import CHUNK_SIZE, RowRunner
from ...core.cache.weight_gathering import WeightGathering, current_pass
from ...core.comm import Ranks, group_rank, group_size
from . import compat
from .attention import TreeDotProductAttention, serving
from .weight_gathering import add_gathering, weight_gathering_of

compat.megatron_version()  # a clear error before the import below fails


ROTARY = ("rope", "yarn")
POSITIONS = ("learned_absolute", *ROTARY, "none")
# Options of the TransformerConfig, of this or another release, that a cache does not support; and what to do.
_BUILD_ANEW = "build the model for serving without it and load the same checkpoint"
REFUSED_OPTIONS = {
    "tp_comm_overlap": _BUILD_ANEW,
    "cache_mla_latents": "set it to False: MegatronRunner keeps latents without it",
    "mtp_num_layers": "build the model without mtp_block_spec and load the checkpoint without these layers",
    "cuda_graph_impl": "set it to 'none'; MegatronRunner(cuda_graphs=True) has graphs of its own",
    "experimental_attention_variant": "layers of another kind would need a cache of their own",
    "fp8": _BUILD_ANEW,
    "fp4": _BUILD_ANEW,
    "fused_single_qkv_rope": "set it to False",
    "moe_expert_capacity_factor": "set it to None: what is dropped would depend on the other rows",
}


class MegatronRunner(RowRunner):
    """A GPTModel with tree attention and the rows that it runs over, their keys and values spread over ranks.

    Every rank of the context- and tensor-parallel groups calls the same methods in the same order with equal arguments.
    With tensor parallelism alone (context_parallel_size=1) each of N ranks holds 1/N of the weights and of the cache,
    also with fewer KV heads than ranks, and gathers weights for a long chunk if that sends less (weight_gathering.py).
    Supported: MHA, GQA, MQA, MLA (the cache holds latents, see `cache.latent`), sliding windows of any layers,
    attention sinks, rotary (also YaRN), learned or no positions, tensor parallelism, experts. The model may be trained
    or run otherwise between calls; Megatron's `sequence_parallel` is off while it is served.

    Args:
        model: GPTModel (or a wrapper of it, as Float16Module) in eval mode, with TreeDotProductAttention in all layers.
        page_size: tokens of a page of the cache. On GPUs 16, 32, 64, 128 or 256.
        dtype: of the cache: "auto" (the model's), "int8" or "fp8", with a scale for each token and head.
        schedule: how partial attention is merged, see `tree_decode`.
        vocab_size: size of the tokenizer's vocabulary, if the model's is padded; logits are cut to it.
        token_group, chunk_size, capacity_tokens, cuda_graphs, record_steps: see `RowRunner`; token_group by default
            Megatron's tensor- and context-parallel group.
    Raises:
        ValueError: a model in training mode, split by pipeline parallelism, with other core attention, or with options
            of `REFUSED_OPTIONS`. Nothing has been sent then, and all ranks, having the same model, raise it.
    """

    def __init__(
        self,
        model: Any,
        *,
        page_size: int = 16,
        dtype: str = "auto",
        schedule: str = "auto",
        vocab_size: int | None = None,
        token_group=None,
        chunk_size: int = CHUNK_SIZE,
        capacity_tokens: int | None = None,
        cuda_graphs: bool = False,
        record_steps: bool = False,
    ):
        self.model = _unwrapped(model)
        _check_model(self.model)
        self._cores = _core_attentions(self.model)
        if vocab_size is not None and not 1 <= vocab_size <= self.model.vocab_size:
            raise ValueError(f"vocab_size={vocab_size} must be from 1 to the model's {self.model.vocab_size}")
        if not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_size={page_size!r} must be a positive number of tokens")
        group, head_shares, weight_gathering = _share_weights(self.model, self._cores[0])
        # to the right of its token a causal query sees nothing
        windows = [(left, 0) if left >= 0 else (-1, -1) for left, _ in (core.window_size for core in self._cores)]
        store = ShardedCache(
            [None if left < 0 else left + 1 for left, _ in windows],
            rank=group_rank(group),
            world=group_size(group),
            page_size=page_size,
            dtype=dtype,
            latent=bool(self.model.config.multi_latent_attention),
        )
        super().__init__(
            store,
            cp_group=group,
            token_group=compat.token_group(self.model) if token_group is None else token_group,
            device=next(self.model.parameters()).device,
            vocab_size=self.model.vocab_size if vocab_size is None else vocab_size,
            max_positions=self.model.max_sequence_length,
            chunk_size=chunk_size,
            capacity_tokens=capacity_tokens,
            schedule=schedule,
            head_shares=head_shares,
            weight_gathering=weight_gathering,
            config=self._cores[0].tree_config,
            cuda_graphs=cuda_graphs,
            record_steps=record_steps,
        )
        self._switches = compat.sequence_parallel_switches(self.model)
        self._layers = {core: (layer, windows[layer]) for layer, core in enumerate(self._cores)}
        _add_hooks(self.model)

    def _run(self, forward: ForwardPass, tokens: Tensor, positions: Tensor, keep: list[int] | None) -> Tensor:
        if self.model.training:
            raise ValueError("the model is in training mode: call model.eval() before it is served")
        token = serving.set(ServedPass(forward, self._layers, positions, keep))
        try:
            with compat.switched_off(self._switches):
                logits = self.model(tokens, positions, None, runtime_gather_output=True)
        finally:
            serving.reset(token)
        return logits[..., : self.vocab_size]


@dataclass(frozen=True)
class ServedPass:
    """One pass of a served model; its layers read it from `serving`."""

    forward: ForwardPass
    layers: dict[TreeDotProductAttention, tuple[int, tuple[int, int]]]
    """By core attention: its layer in the cache, and its window."""
    positions: Tensor
    """int64 [b, n] of this rank's tokens."""
    keep: list[int] | None
    """Indices of the tokens whose logits are wanted; None: all."""
    latents: dict[TreeDotProductAttention, Latents] = field(default_factory=dict)
    """By core attention of MLA: the input of its next call."""

    def attend(self, core: TreeDotProductAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Core attention over the cache: writes k and v of the new tokens, returns [n, b, h/tp * d_v].

        query: [n, b, h/tp, d], or with all heads of this rank's KV head if several ranks share it.
        """
        layer, window_size = self.layers[core]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        new, heads = self.latents.pop(core, (None, None))
        if heads is not None:
            k, v = new.transpose(0, 1)[:, :, None], k[:, :, :1, heads.head_dim_nope :]  # all heads have one rotary key
        self.forward.write(layer, k, v)
        out = self.forward.attend(
            layer,
            q,
            latent=heads,
            config=core.tree_config,
            softmax_scale=core.softmax_scale,
            window_size=window_size,
            softcap=core.softcap,
            sinks=core.softmax_offset,
        )
        return out.transpose(0, 1).flatten(2)


def _add_hooks(model: Any) -> None:
    """Hooks that act while the model is served; added once."""
    if getattr(model, "_megatron_tree_served", False):
        return
    model._megatron_tree_served = True
    for name, module in model.named_modules():
        if name.split(".")[-1] == "rotary_pos_emb":
            module.register_forward_pre_hook(_ask_all_positions, with_kwargs=True)
            module.register_forward_hook(_pick_positions)
    model.output_layer.register_forward_pre_hook(_pick_token)
    add_gathering(model)
    hand_latents_on(model)
    gather_projections_once(model)


def _ask_all_positions(module, args, kwargs):
    if (served := serving.get()) is None:
        return None
    # the next power of two: Megatron caches the embedding of each length that it is asked for
    return (1 << (served.forward.end - 1).bit_length(),), {"packed_seq": True}


def _pick_positions(module, args, embedding):
    served = serving.get()
    return None if served is None else _rows_of(embedding, served.positions)


def _pick_token(module, args):
    served = serving.get()
    if served is None or served.keep is None:
        return None
    return args[0][served.keep], *args[1:]


def _rows_of(embedding: Any, positions: Tensor) -> Any:
    """Rotary embedding [n, b, 1, d] of positions [b, n], from [s, 1, 1, d] (with YaRN's scale, if any)."""
    if isinstance(embedding, tuple):
        return (_rows_of(embedding[0], positions), *embedding[1:])
    return embedding[:, 0][positions.t()]


def _unwrapped(model: Any) -> Any:
    gpt_model = compat.lookup("megatron.core.models.gpt.gpt_model:GPTModel")
    inner = model
    while not isinstance(inner, gpt_model):
        inner = getattr(inner, "module", None)
        if inner is None:
            raise ValueError(f"model is a {type(model).__name__}: MegatronRunner serves a GPTModel of Megatron-core")
    return inner


def _check_model(model: Any) -> None:
    config, positions = model.config, model.position_embedding_type
    if config.pipeline_model_parallel_size > 1 or not (model.pre_process and model.post_process):
        raise ValueError(
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size}: a served model runs on every rank "
            "from the first layer to the last. Build it with pipeline_model_parallel_size=1 and, instead, more tensor "
            "parallelism; a distributed checkpoint loads into any layout"
        )
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() before it is served")
    for name, way_out in REFUSED_OPTIONS.items():
        value = getattr(config, name, None)
        if value and value != "none":
            raise ValueError(f"{name}={value!r} in the TransformerConfig: MegatronRunner can't serve it; {way_out}")
    if positions not in POSITIONS:
        raise ValueError(f"position_embedding_type={positions!r}: MegatronRunner serves {', '.join(POSITIONS)}")
    if config.apply_rope_fusion and (positions in ROTARY or config.multi_latent_attention):
        raise ValueError(
            "apply_rope_fusion=True in the TransformerConfig: the fused kernel takes one position for all rows of a "
            "batch; set it to False"
        )
    if getattr(model, "use_fused_lce", False):  # of newer releases
        raise ValueError(
            "cross_entropy_loss_fusion with an output layer that returns the loss: a served model returns logits; set "
            "cross_entropy_loss_fusion to False"
        )
    ranks, experts = config.tensor_model_parallel_size * config.context_parallel_size, 1
    if config.num_moe_experts:
        experts = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or 1)
    if experts > ranks:
        raise ValueError(
            f"expert_model_parallel_size={config.expert_model_parallel_size}: experts on {experts} ranks need as many "
            f"that run the same tokens, but tensor and context parallelism have {ranks}; lower it, or raise those"
        )


def _core_attentions(model: Any) -> list[TreeDotProductAttention]:
    """The core attention of each layer that has one, in order."""
    named = [(name, module) for name, module in model.decoder.named_modules() if name.endswith(".core_attention")]
    others = [
        f"{name} is {type(core).__name__}" for name, core in named if not isinstance(core, TreeDotProductAttention)
    ]
    if others or not named:
        raise ValueError(
            f"the model has other core attention than TreeDotProductAttention ({(others or ['none'])[0]}): build it "
            "with get_gpt_layer_tree_spec, use_tree_attention or install()"
        )
    recurrent = next((module for module in model.decoder.modules() if compat.is_recurrent(module)), None)
    if recurrent is not None:
        raise ValueError(
            f"the model has a {type(recurrent).__name__}: MegatronRunner keeps keys and values, and no recurrent states"
        )
    causal = (AttnMaskType.causal, AttnMaskType.padding_causal)
    for name, core in named:
        if core.is_cross or core.attn_mask_type not in causal:
            raise ValueError(
                f"{name} has attn_mask_type {core.attn_mask_type.name}{', cross attention' if core.is_cross else ''}: "
                "a KV cache serves causal self attention"
            )
    return [core for _, core in named]


def _share_weights(
    model: Any, core: TreeDotProductAttention
) -> tuple[Any, tuple[int, ...] | None, WeightGathering | None]:
    """(the ranks that share the cache, the query heads of each if they share weights, too, and how they gather them).

    With more tensor-parallel ranks than KV heads, neighbours have the same KV head, and each some of its query heads.
    """
    config = model.config
    tp = config.tensor_model_parallel_size
    if core.cp_group is not None or tp == 1:
        return core.cp_group, None, None
    groups = min(tp, 1 if config.multi_latent_attention else config.num_query_groups)
    ranks = Ranks.of(core.tp_group, next(model.parameters()).device, core.tree_config)
    gathering = weight_gathering_of(model, ranks, groups)
    if tp == groups:
        return None, None, gathering
    group = ranks.neighbours(tp // groups)
    return group, (config.num_attention_heads // tp,) * (tp // groups), gathering


# Multi-latent attention: core attention gets latents instead of keys and values. Megatron's layer passes latents to an
# up-projection, which makes the keys and values of its heads. While the model is served the up-projection keeps its
# input; core attention takes that and the rotary part of the keys, and reads the cache with the up-projection's weight
# (cache/latent.py).


class Latents(NamedTuple):
    """The input of a layer's up-projection."""

    tokens: Tensor
    """[n, b, r], normed."""
    heads: LatentHeads
    """How this rank's heads read them."""


def hand_latents_on(model: Any) -> None:
    """Change a GPTModel's multi-latent attention; outside of a `ServedPass` it is unchanged."""
    for layer in model.decoder.modules():
        if (up := getattr(layer, "linear_kv_up_proj", None)) is not None:
            up.forward = functools.partial(_hand_on, layer, up, up.forward)


def _hand_on(layer: Any, up: Any, forward, latents: Tensor, *args, **kwargs):
    served = serving.get()
    if served is None:
        return forward(latents, *args, **kwargs)
    nope = layer.config.qk_head_dim
    heads = LatentHeads(up.weight.unflatten(0, (-1, nope + layer.config.v_head_dim)), nope)
    served.latents[layer.core_attention] = Latents(compat.normed_input(up, latents, layer.config), heads)
    unread = latents.new_zeros(1).expand(*latents.shape[:-1], len(up.weight))  # takes no memory
    return unread, None


# More tensor-parallel ranks than KV heads: several ranks hold one KV head's projection. Megatron's layer gathers all
# heads' projections on all ranks and keeps the queries of local heads, which attention over the cache would gather
# again. While the model is served, only the ranks that have the same KV head gather, and each keeps all queries of that
# head.


def gather_projections_once(model: Any) -> None:
    """Change a GPTModel's self attention; outside of a `ServedPass` it is unchanged."""
    for layer in model.decoder.modules():
        if hasattr(layer, "linear_qkv") and hasattr(layer, "core_attention"):
            project = layer.get_query_key_value_tensors
            layer.get_query_key_value_tensors = functools.partial(_project_head_group, layer, project)


def _project_head_group(layer: Any, project, hidden: Tensor, key_value_states=None, **options):
    """q [s, b, heads of the KV head, d], and its k and v [s, b, 1, d]."""
    served = serving.get()
    split = served is not None and served.forward.head_shares is not None and current_pass.get() is None
    if not split or options.get("output_gate") or not options.get("split_qkv", True):
        return project(hidden, key_value_states, **options)
    config, (local, _) = layer.core_attention.tree_config, layer.linear_qkv(hidden)
    ranks = Ranks.of(served.forward.cp_group, local.device, config)
    whole = ranks.gather(local.movedim(-1, 0).contiguous()).movedim(0, -1)
    heads = whole.unflatten(-1, (-1, layer.hidden_size_per_attention_head))
    query, key, value = heads.split((heads.shape[2] - 2, 1, 1), 2)
    if layer.q_layernorm is not None:
        query = layer.q_layernorm(query)
    if layer.k_layernorm is not None:
        key = layer.k_layernorm(key)
    return query, key, value
