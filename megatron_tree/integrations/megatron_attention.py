"""Megatron-core's core attention, over a sequence that is sharded across the context-parallel group."""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any

import torch

from ..config import TreeConfig
from ..functional import tree_attn_func
from ..shard import shard_positions
from . import megatron_compat as compat

compat.megatron_version()  # a clear error before the imports below fail

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


def tree_config_for(cp_comm_type: str | None, cp_size: int, tree_config: TreeConfig | None = None) -> TreeConfig:
    """What a layer's `cp_comm_type` means.

    Args:
        cp_comm_type: "tree" or None: `tree_config` as it is (by default the planner chooses the grid); "p2p": KV is
            passed round a ring; "all_gather": KV is gathered, queries stay, the grid (1, cp_size).
        cp_size: ranks of the context-parallel group.
        tree_config: backend, wire format and checks of all layers, and the grid of the "tree" layers.
    Raises: ValueError for any other `cp_comm_type`.
    """
    base = tree_config if tree_config is not None else TreeConfig()
    if cp_comm_type is None or cp_comm_type == "tree":
        return base
    if cp_comm_type == "p2p":
        return dataclasses.replace(base, schedule="ring", grid=None, grid_backward=None, head_groups=None)
    if cp_comm_type == "all_gather":
        return dataclasses.replace(base, schedule="grid", grid=(1, cp_size), grid_backward=None)
    raise ValueError(
        f"cp_comm_type={cp_comm_type!r} is not supported by tree attention: choose one of "
        f"{', '.join(map(repr, compat.CP_COMM_TYPES))}, or leave this layer's core attention as TransformerEngine's"
    )


class TreeDotProductAttention(MegatronModule):
    """Drop-in for `DotProductAttention` and `TEDotProductAttention` with context parallelism of any schedule.

    The sequence is sharded as Megatron's `get_batch_on_this_cp_rank` does it (zigzag). Supported: causal and full
    attention, MHA, GQA, MQA, value heads of another size, sliding windows (`window_size`, `window_attn_skip_freq`),
    attention sinks (`softmax_type` "off-by-one" and "learnable"), tensor and pipeline parallelism, activation
    recomputation.

    Args:
        config: TransformerConfig. `context_parallel_size` must equal the size of the context-parallel group.
        layer_number: 1-based number of the layer.
        attn_mask_type: AttnMaskType.causal or AttnMaskType.no_mask.
        attention_type: "self".
        attention_dropout: must be 0 or None with `config.attention_dropout` 0.
        softmax_scale: default 1 / sqrt(head_dim).
        cp_comm_type: "tree" (also None), "p2p" or "all_gather"; see `tree_config_for`.
        pg_collection: process groups `tp` and `cp`; default: those of Megatron's parallel state.
        model_comm_pgs: the older name of `pg_collection`.
        k_channels, v_channels: head sizes of keys and values where they differ (MLA).
        tree_config: TreeConfig, to pin the grid or the backend. Passed by `use_tree_attention`.
    Raises: ValueError for options that would change the result and can't be honoured.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        model_comm_pgs: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        tree_config: TreeConfig | None = None,
        **newer_arguments: Any,
    ):
        super().__init__(config=config)
        compat.refuse_unknown_arguments("the constructor of TreeDotProductAttention", newer_arguments)
        self.tp_group, self.cp_group = compat.process_groups(pg_collection, model_comm_pgs)
        cp_size = config.context_parallel_size
        if cp_size == 1:
            self.cp_group = None  # Megatron's configuration counts, whatever group exists
        elif self.cp_group.size() != cp_size:
            raise ValueError(
                f"context_parallel_size={cp_size} in the TransformerConfig, but the context-parallel group has "
                f"{self.cp_group.size()} ranks: initialize Megatron's parallel state with the same size"
            )
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.cp_comm_type = cp_comm_type
        self.tree_config = tree_config_for(cp_comm_type, cp_size, tree_config)
        for name in ("grid", "grid_backward"):
            grid = getattr(self.tree_config, name)
            if grid is not None and math.prod(grid) != cp_size:
                raise ValueError(f"{name}={grid} has {math.prod(grid)} places, context_parallel_size is {cp_size}")
        _refuse_unsupported(config, attention_type, attention_dropout)
        # apply_query_key_layer_scaling needs nothing here: it divides the scores by the layer number and multiplies
        # them again inside the softmax, against fp16 overflow; our scores are fp32.
        head_dim = k_channels if k_channels is not None else config.kv_channels
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        self.window_size = compat.window_of_layer(config, self.layer_number)
        self.current_max_attn_logits = None
        self._add_sinks(config)

    def _add_sinks(self, config: Any) -> None:
        softmax_type = getattr(config, "softmax_type", "vanilla")
        if softmax_type == "vanilla":
            self.softmax_offset = None
            return
        num_heads = config.num_attention_heads // self.tp_group.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        sinks = torch.zeros(num_heads, dtype=config.params_dtype, device=device)
        if softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", sinks, persistent=False)
        elif softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(sinks)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        else:
            raise ValueError(f"softmax_type={softmax_type!r} in the TransformerConfig is unknown to tree attention")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **newer_arguments: Any,
    ) -> torch.Tensor:
        """Attention of this rank's queries over the whole sequence.

        Args:
            query: [s/cp, b, heads/tp, d]. key: [s/cp, b, kv_heads/tp, d]. value: [s/cp, b, kv_heads/tp, d_v].
            attention_mask: None, or the causal mask that Megatron's data loaders make, True = hidden,
                [1 or b, 1, s/cp, s]; it is compared with the causal mask once per tensor. None costs nothing.
            attn_mask_type: overrides the constructor's.
        Returns: [s/cp, b, heads/tp * d_v], dtype of `query`.
        Raises: ValueError for packed sequences, a bias, another mask, or keys of another length.
        """
        compat.refuse_unknown_arguments("the forward of TreeDotProductAttention", newer_arguments)
        if packed_seq_params is not None:
            raise ValueError(
                "packed_seq_params is set: tree attention does not take packed (thd) sequences yet; "
                "pad documents to the sequence length, or use TransformerEngine's core attention"
            )
        if attention_bias is not None:
            raise ValueError("attention_bias is set: tree attention adds no bias to the scores; pass None")
        if query.dim() != 4 or key.shape[:2] != query.shape[:2] or value.shape[:3] != key.shape[:3]:
            raise ValueError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: expected "
                "[s, b, heads, d] with equal s and b (self attention; to decode with a KV cache use tree_decode)"
            )
        mask_type = attn_mask_type if attn_mask_type is not None else self.attn_mask_type
        if mask_type not in _CAUSAL:
            raise ValueError(f"attn_mask_type {mask_type}: tree attention takes {', '.join(map(str, _CAUSAL))}")
        if attention_mask is not None:
            self._check_mask(attention_mask, _CAUSAL[mask_type], query.shape[0])
        out = tree_attn_func(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            cp_group=self.cp_group,
            causal=_CAUSAL[mask_type],
            softmax_scale=self.softmax_scale,
            window_size=self.window_size,
            sinks=self.softmax_offset,
            config=self.tree_config,
        )
        return out.transpose(0, 1).flatten(2)

    def _check_mask(self, mask: torch.Tensor, causal: bool, num_rows: int) -> None:
        if not causal:
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} with attn_mask_type no_mask: pass attention_mask=None"
            )
        if _known_causal.is_same(mask):
            return
        world = self.config.context_parallel_size
        rank = self.cp_group.rank() if self.cp_group is not None else 0
        rows = shard_positions(num_rows * world, rank, world, "zigzag").to(mask.device)
        hidden = torch.arange(num_rows * world, device=mask.device) > rows[:, None]
        if mask.dtype != torch.bool or mask.shape[-2:] != hidden.shape or not torch.equal(mask, hidden.expand_as(mask)):
            raise ValueError(
                f"attention_mask {mask.dtype} {tuple(mask.shape)} is not the causal mask of this rank's rows "
                f"{tuple(hidden.shape)}: tree attention takes no other mask; "
                "turn --reset-attention-mask off, or pass None"
            )
        _known_causal.remember(mask)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict:
        """The learnable sinks, sharded over the tensor-parallel ranks; same key as Megatron's own core attention."""
        return compat.sharded_parameters(self, prefix, {"softmax_offset": 0}, sharded_offsets, metadata, self.tp_group)


def _refuse_unsupported(config: Any, attention_type: str, attention_dropout: float | None) -> None:
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    if dropout:
        raise ValueError(
            f"attention_dropout={dropout} (Megatron's default is 0.1): "
            "tree attention has no dropout yet, set attention_dropout=0.0"
        )
    if attention_type != "self":
        raise ValueError(
            f"attention_type={attention_type!r}: tree attention is self attention; leave cross attention layers alone"
        )
    for name in ("qk_clip", "log_max_attention_logit", "fp8_dot_product_attention"):
        if getattr(config, name, False):
            raise ValueError(
                f"{name}=True in the TransformerConfig is not supported by tree attention: set it to False"
            )


class _KnownCausalMask:
    """The mask tensor that was last found to be causal: a model passes the same one to every layer."""

    def __init__(self):
        self._tensor, self._version = None, None

    def is_same(self, mask: torch.Tensor) -> bool:
        return self._tensor is not None and self._tensor() is mask and self._version == mask._version

    def remember(self, mask: torch.Tensor) -> None:
        self._tensor, self._version = weakref.ref(mask), mask._version


_known_causal = _KnownCausalMask()
