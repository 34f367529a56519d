"""Serve a Megatron-core GPTModel: decoding and prefill with the KV cache sharded over the context-parallel ranks.

    runner = MegatronRunner(model.eval())                # a GPTModel whose core attention is tree attention
    row = runner.add()
    logits = runner.prefill(row, prompt)                 # every rank runs its share of each chunk
    logits = runner.step([row], logits.argmax(-1).view(1, 1))

Megatron's inference contexts don't fit: static ones keep keys before their positions are applied, for rows of one
length, dynamic ones call flash-attn in place of the core attention, and neither knows context parallelism. So the model
runs without one, as in training. Its core attention hands the new keys and values, positions applied, to the cache
(`TreeDotProductAttention.serving`); its rotary embedding and its output layer get hooks, for the time of a call, that
pick the positions of this rank's tokens and the tokens whose logits are wanted.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch import Tensor

from ...cache import ShardedCache
from ...cache.forward import ForwardPass
from ...cache.runner import CHUNK_SIZE, RowRunner
from . import compat as compat
from .attention import TreeDotProductAttention

compat.megatron_version()  # a clear error before the import below fails

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

ROTARY = ("rope", "yarn")
POSITIONS = ("learned_absolute", *ROTARY, "none")
# Options of the TransformerConfig, of this or another release, that a cache can't honour; and the way out.
_BUILD_ANEW = "build the model for serving without it and load the same checkpoint"
REFUSED_OPTIONS = {
    "sequence_parallel": _BUILD_ANEW,
    "cache_mla_latents": "set it to False: keys and values of all heads are kept",
    "mtp_num_layers": "build the model without mtp_block_spec and load the checkpoint without these layers",
    "cuda_graph_impl": "set it to 'none'",
    "enable_cuda_graph": "set it to False",
    "external_cuda_graph": "set it to False",
    "fp8": _BUILD_ANEW,
    "fp4": _BUILD_ANEW,
    "fused_single_qkv_rope": "set it to False",
    "moe_expert_capacity_factor": "set it to None: what is dropped would depend on the other rows",
}


class MegatronRunner(RowRunner):
    """A GPTModel with tree attention and the rows that it runs over, their keys and values spread over the cp ranks.

    Every rank of the context- and tensor-parallel groups calls the same methods in the same order with equal arguments.
    Supported: MHA, GQA, MQA, MLA (the cache holds keys and values of all heads, not their latent), sliding windows of
    any layers, attention sinks, rotary (also YaRN), learned or no positions, tensor parallelism, experts. The model may
    be trained or run otherwise between calls.

    Args:
        model: GPTModel (or a wrapper of it, as Float16Module) in eval mode, with TreeDotProductAttention in all layers.
        block_size: tokens of a page of the cache. On GPUs 16, 32, 64, 128 or 256.
        dtype: of the cache: "auto" (the model's), "int8" or "fp8", with a scale for each token and head.
        schedule: how partial attention is merged, see `tree_decode`.
        vocab_size: words of the tokenizer, if the model's vocabulary is padded; logits end there.
        token_group, chunk_size, capacity_tokens: see `RowRunner`; token_group by default Megatron's tensor- and
            context-parallel group.
    Raises:
        ValueError: a model in training mode, split by pipeline parallelism, with other core attention, or with options
            of `REFUSED_OPTIONS`. Nothing has been sent then, and all ranks, having the same model, raise it.
    """

    def __init__(
        self,
        model: Any,
        *,
        block_size: int = 16,
        dtype: str = "auto",
        schedule: str = "auto",
        vocab_size: int | None = None,
        token_group=None,
        chunk_size: int = CHUNK_SIZE,
        capacity_tokens: int | None = None,
    ):
        self.model = _unwrapped(model)
        _check_model(self.model)
        self._cores = _core_attentions(self.model)
        self._rotary = [x for name, x in self.model.named_modules() if name.split(".")[-1] == "rotary_pos_emb"]
        if vocab_size is not None and not 1 <= vocab_size <= self.model.vocab_size:
            raise ValueError(f"vocab_size={vocab_size} must be from 1 to the model's {self.model.vocab_size}")
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size={block_size!r} must be a positive number of tokens")
        group = self._cores[0].cp_group
        self._windows = [_causal_window(core.window_size) for core in self._cores]
        store = ShardedCache(
            [None if left < 0 else left + 1 for left, _ in self._windows],
            rank=0 if group is None else group.rank(),
            world=1 if group is None else group.size(),
            page_size=block_size,
            dtype=dtype,
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
            config=self._cores[0].tree_config,
        )

    def _run(self, forward: ForwardPass, tokens: Tensor, positions: Tensor, keep: int | None) -> Tensor:
        if self.model.training:
            raise ValueError("the model is in training mode: call model.eval() before it is served")
        with contextlib.ExitStack() as stack:
            for layer, core in enumerate(self._cores):
                core.serving = functools.partial(self._attend, forward, layer)
                stack.callback(setattr, core, "serving", None)
            whole = _at_least(forward.end)
            ask = lambda module, args, kwargs: ((whole,), {"packed_seq": True})  # noqa: E731
            pick = lambda module, args, found: _rows_of(found, positions)  # noqa: E731
            for rotary in self._rotary:
                stack.enter_context(_hook(rotary.register_forward_pre_hook, ask, with_kwargs=True))
                stack.enter_context(_hook(rotary.register_forward_hook, pick))
            if keep is not None:
                last = lambda module, args: (args[0][keep : keep + 1], *args[1:])  # noqa: E731
                stack.enter_context(_hook(self.model.output_layer.register_forward_pre_hook, last))
            logits = self.model(tokens, positions, None, runtime_gather_output=True)
        return logits[..., : self.vocab_size]

    def _attend(self, forward: ForwardPass, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What a layer's core attention does during a call: q [n, b, h/tp, d] and so on, out [n, b, h/tp * d_v]."""
        core = self._cores[layer]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        forward.write(layer, k, v)
        out = forward.attend(
            layer,
            q,
            config=core.tree_config,
            softmax_scale=core.softmax_scale,
            window_size=self._windows[layer],
            softcap=core.softcap,
            sinks=core.softmax_offset,
        )
        return out.transpose(0, 1).flatten(2)


@contextlib.contextmanager
def _hook(register, hook, **options):
    handle = register(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def _at_least(length: int) -> int:
    """The power of two from `length` on: Megatron caches the embedding of each length that it is asked for."""
    return 1 << (length - 1).bit_length()


def _rows_of(found: Any, positions: Tensor) -> Any:
    """Rotary embedding [n, b, 1, d] of positions [b, n], from that of all, [s, 1, 1, d] (with YaRN's scale, if any)."""
    if isinstance(found, tuple):
        return (_rows_of(found[0], positions), *found[1:])
    return found[:, 0][positions.t()]


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
    causal = (AttnMaskType.causal, AttnMaskType.padding_causal)
    for name, core in named:
        if core.is_cross or core.attn_mask_type not in causal:
            raise ValueError(
                f"{name} has attn_mask_type {core.attn_mask_type.name}{', cross attention' if core.is_cross else ''}: "
                "a KV cache serves causal self attention"
            )
    return [core for _, core in named]


def _causal_window(window: tuple[int, int]) -> tuple[int, int]:
    """A layer's window without what lies to the right, which a causal query never sees; (-1, -1) for none."""
    return (window[0], 0) if window[0] >= 0 else (-1, -1)
