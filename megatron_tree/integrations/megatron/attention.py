"""Core attention for Megatron-core over a sequence that is sharded across the context-parallel group."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ...core import comm
from ...core.attention.functional import tree_attn_func, tree_attn_varlen_func
from ...core.config import CP_COMM_TYPES, TreeConfig, default_config
from ...core.layout import PrefixTree, ReadOnce, shard_positions
from . import compat
from .documents import check_cut, check_rolled, is_one_document

compat.megatron_version()  # a clear error before the imports below fail


serving: ContextVar[Any] = ContextVar("serving", default=None)
"""While a model is served: the `inference.ServedPass` whose `attend` takes the place of core attention."""


def tree_config_for(
    cp_comm_type: str | None, cp_sizes: tuple[int, int], tree_config: TreeConfig | None = None
) -> TreeConfig:
    """The TreeConfig of a layer with this `cp_comm_type`.

    Args:
        cp_comm_type: "tree" or None: `tree_config` unchanged (by default the planner chooses the ranks that exchange
            heads and the grid of the others); "p2p": KV circulates in a ring; "all_gather": KV is gathered, the grid
            (1, cp); "a2a": heads are split over all ranks (Ulysses); "a2a+tree", "a2a+p2p": heads are split over the
            first of `cp_sizes`, and the second part joins the other ranks.
        cp_sizes: (Ulysses ranks, other ranks) of the context-parallel group for types of two parts, else (1, cp).
        tree_config: options of all layers, and the grid of the "tree" layers; None: `config.default_config`.
    Raises: ValueError for any other `cp_comm_type`.
    """
    base, cp_size = tree_config if tree_config is not None else default_config(), math.prod(cp_sizes)
    ring = dict(schedule="ring", grid=None, grid_backward=None, head_chunks=None)
    if cp_comm_type is None or cp_comm_type == "tree":
        return base
    if cp_comm_type == "p2p":
        return dataclasses.replace(base, **ring, ulysses_size=1)
    if cp_comm_type == "all_gather":
        return dataclasses.replace(base, schedule="grid", grid=(1, cp_size), grid_backward=None, ulysses_size=1)
    if cp_comm_type == "a2a":
        return dataclasses.replace(base, schedule="grid", grid=None, grid_backward=None, ulysses_size=cp_size)
    if cp_comm_type == "a2a+tree":
        return dataclasses.replace(base, ulysses_size=cp_sizes[0])
    if cp_comm_type == "a2a+p2p":
        return dataclasses.replace(base, **ring, ulysses_size=cp_sizes[0])
    raise ValueError(
        f"cp_comm_type={cp_comm_type!r} is not supported by tree attention: choose one of "
        f"{', '.join(map(repr, CP_COMM_TYPES))}, or use TransformerEngine's core attention in this layer"
    )


class TreeDotProductAttention(MegatronModule):
    """Replaces `DotProductAttention` and `TEDotProductAttention`; context parallelism with any schedule.

    The sequence is sharded as by Megatron's `get_batch_on_this_cp_rank`: zigzag, packed documents one by one.
    Supported: causal and full attention, padded and packed (thd) batches, cross attention, MHA, GQA, MQA, value
    heads of another size, sliding windows (`window_size`, `window_attn_skip_freq`), attention sinks (`softmax_type`
    "off-by-one" and "learnable"), dropout, the largest logits (`qk_clip`, `log_max_attention_logit`), tensor and
    pipeline parallelism, activation recomputation.

    Args:
        config: TransformerConfig. `context_parallel_size` must equal the size of the context-parallel group.
        layer_number: 1-based number of the layer.
        attn_mask_type: causal, padding, padding_causal, no_mask, or arbitrary with a mask that is one of these.
        attention_type: "self" or "cross".
        attention_dropout: default `config.attention_dropout`. The mask depends on a seed from Megatron's random
            state and is the same for any number of context-parallel ranks.
        softmax_scale: default 1 / sqrt(head_dim).
        cp_comm_type: "tree" (also None), "p2p", "all_gather", "a2a", "a2a+tree" or "a2a+p2p"; see `tree_config_for`.
        pg_collection: process groups `tp` and `cp`; default: those of Megatron's parallel state.
        k_channels, v_channels: head sizes of keys and values, if they differ (MLA).
        tree_config: TreeConfig that fixes the grid or the backend; `use_tree_attention` passes it.
    Raises: ValueError for options that would change the result and are not supported.
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
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        tree_config: TreeConfig | None = None,
        **newer_arguments: Any,
    ):
        super().__init__(config=config)
        compat.refuse_unknown_arguments("the constructor of TreeDotProductAttention", newer_arguments)
        self.tp_group, self.cp_group = compat.layer_groups(config, pg_collection)
        cp_size = config.context_parallel_size
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.cp_comm_type = cp_comm_type
        two_parts = cp_comm_type is not None and "+" in cp_comm_type
        sizes = compat.hierarchical_sizes(config, self.cp_group) if two_parts else (1, cp_size)
        self._base_config, self.tree_config = tree_config, tree_config_for(cp_comm_type, sizes, tree_config)
        self._check_layout()
        if attention_type not in ("self", "cross"):
            raise ValueError(f"attention_type={attention_type!r}: tree attention is 'self' or 'cross' attention")
        if getattr(config, "fp8_dot_product_attention", False):
            raise ValueError("fp8_dot_product_attention=True is not supported by tree attention: set it to False")
        self.is_cross = attention_type == "cross"  # keys and queries may differ in length
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        # apply_query_key_layer_scaling needs nothing here: against fp16 overflow it divides the scores by the layer
        # number, and multiplies them by it inside the softmax. Our scores are fp32.
        head_dim = k_channels if k_channels is not None else config.kv_channels
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        self.window_size = compat.window_of_layer(config, self.layer_number)
        self.softcap = getattr(config, "attn_logit_softcapping", None) or 0.0
        self.keeps_max_logits = any(getattr(config, name, False) for name in ("qk_clip", "log_max_attention_logit"))
        self.current_max_attn_logits = None
        self._add_sinks(config)

    def _check_layout(self) -> None:
        config, cp_size = self.config, self.config.context_parallel_size
        if cp_size > 1:
            compat.check_layout(config, "attention_cp_layout", "cp_partition_mode")
        ulysses_size = self.tree_config.ulysses_size or 1
        places = cp_size // ulysses_size
        for name in ("grid", "grid_backward"):
            grid = getattr(self.tree_config, name)
            if grid is not None and math.prod(grid) != places:
                raise ValueError(
                    f"{name}={grid} has {math.prod(grid)} places, but context_parallel_size={cp_size} leaves {places} "
                    f"(ulysses_size={ulysses_size})"
                )
        heads = config.num_attention_heads // self.tp_group.size()
        if ulysses_size > heads:
            raise ValueError(
                f"{ulysses_size} context-parallel ranks can't share {heads} query heads "
                f"(cp_comm_type={self.cp_comm_type!r}; num_attention_heads={config.num_attention_heads} over "
                f"{self.tp_group.size()} tensor-parallel ranks): exchange heads over fewer ranks (a2a+tree, "
                "hierarchical_context_parallel_sizes), or use 'tree'"
            )

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

    @comm.outside_graphs
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **newer_arguments: Any,
    ) -> Tensor:
        """Attention of this rank's queries over the whole sequence.

        Args:
            query: [s/cp, b, heads/tp, d]. key: [s/cp, b, kv_heads/tp, d]. value: [s/cp, b, kv_heads/tp, d_v]. With
                packed documents [t/cp, heads/tp, d] and so on.
            attention_mask: None, or a mask that hides later keys, padding at the end of rows, or both; see
                `masks.read_mask`. Each tensor is read once. None costs nothing.
            attn_mask_type: overrides the constructor's.
            packed_seq_params: documents of a packed batch, format "thd".
        Returns: [s/cp, b, heads/tp * d_v], packed [t/cp, heads/tp * d_v], dtype of `query`.
        Raises: ValueError for a bias, another mask, another packing, or keys of another length in self attention.
        """
        compat.refuse_unknown_arguments("the forward of TreeDotProductAttention", newer_arguments)
        if attention_bias is not None:
            raise ValueError("attention_bias is set, but tree attention does not support a bias: pass None")
        if (served := serving.get()) is not None:
            return served.attend(self, query, key, value)
        mask_type = attn_mask_type if attn_mask_type is not None else self.attn_mask_type
        cp_group = compat.group_of_batch(packed_seq_params, self.cp_group)
        options = dict(
            cp_group=cp_group,
            softmax_scale=self.softmax_scale,
            window_size=self.window_size,
            softcap=self.softcap,
            sinks=self.softmax_offset,
            dropout_p=self.dropout_p if self.training else 0.0,
            dropout_seed=self._dropout_seed() if self.training and self.dropout_p else None,
            config=self._config_over(cp_group),
            return_max_logit=self.keeps_max_logits,
        )
        if packed_seq_params is not None and not is_one_document(packed_seq_params):
            return self._packed(query, key, value, attention_mask, mask_type, packed_seq_params, options)
        if query.dim() != 4 or (key.shape[:2] != query.shape[:2] and not self.is_cross):
            raise ValueError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: expected "
                "[s, b, heads, d] with equal s and b in self attention (to decode with a KV cache use MegatronRunner)"
            )
        s, b = query.shape[:2]
        sizes = dict(batch=b, num_queries=s, num_keys=key.shape[0])
        ranks = comm.Ranks.of(cp_group, query.device, self.tree_config)
        options["causal"], lengths = read_mask(attention_mask, mask_type, **sizes, ranks=ranks)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        if lengths is None:
            return self._out(tree_attn_func(q, k, v, **options)).transpose(0, 1).flatten(2)
        # the rows of a padded batch become packed documents
        world = comm.group_size(cp_group)
        bounds = key_bounds = _documents(lengths, key.shape[0] * world)
        if self.is_cross:
            bounds = _documents((s * world,) * b, s * world)
            options |= dict(cu_seqlens_kv=key_bounds[0], cu_seqlens_kv_padded=key_bounds[1])
        options |= dict(cu_seqlens=bounds[0], cu_seqlens_padded=bounds[1])
        out = self._out(tree_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), **options))
        return out.unflatten(0, (b, s)).transpose(0, 1).flatten(2)

    def _config_over(self, cp_group: Any) -> TreeConfig:
        """The TreeConfig for a batch over these ranks, which may differ from the layer's."""
        world = comm.group_size(cp_group)
        if world == self.config.context_parallel_size:
            return self.tree_config
        if self.cp_comm_type is not None and "+" in self.cp_comm_type:
            raise ValueError(
                f"cp_comm_type={self.cp_comm_type!r} has sizes for {self.config.context_parallel_size} ranks, but this "
                f"batch is sharded over {world} (hybrid or dynamic context parallelism): use cp_comm_type='tree'"
            )
        return tree_config_for(self.cp_comm_type, (1, world), self._base_config)

    def _packed(self, query, key, value, attention_mask, mask_type: AttnMaskType, packed: Any, options: dict) -> Tensor:
        if packed.qkv_format != "thd":
            raise ValueError(f"packed_seq_params.qkv_format={packed.qkv_format!r}: tree attention takes 'thd'")
        if attention_mask is not None:
            raise ValueError(
                "attention_mask is set together with packed_seq_params: pass None, cu_seqlens separate the documents"
            )
        options["causal"] = read_mask(
            None, mask_type, batch=1, num_queries=0, num_keys=0, ranks=comm.Ranks.of(None)
        ).causal
        if query.dim() == 4:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        if self.is_cross:
            options |= dict(cu_seqlens_kv=packed.cu_seqlens_kv, cu_seqlens_kv_padded=packed.cu_seqlens_kv_padded)
        layout = getattr(packed, "layout", None)
        if layout is not None:
            options["layout"] = layout
        else:
            options |= dict(cu_seqlens=packed.cu_seqlens_q, cu_seqlens_padded=packed.cu_seqlens_q_padded)
        check_cut(packed, options["cp_group"])
        check_rolled(packed, self.config)
        if getattr(packed, "prefix_tree", None) is not None:
            return self._over_tree(query, key, value, packed.prefix_tree, options)
        return self._out(tree_attn_varlen_func(query, key, value, **options)).flatten(1)

    def _over_tree(self, query, key, value, tree: PrefixTree, options: dict) -> Tensor:
        """Attention of rows that share tokens."""
        if self.is_cross or not options.pop("causal") or options["dropout_p"]:
            raise ValueError(
                f"layer {self.layer_number} (cross attention: {self.is_cross}, {self.attn_mask_type}, "
                f"attention_dropout={options['dropout_p']}) takes no prefix_tree, which is for causal self attention "
                "without dropout: set attention_dropout to 0, or pack the rows as documents"
            )
        window = options.pop("window_size")[0]
        options["ranges"] = tree.ranges(None if window < 0 else window + 1)
        return self._out(tree_attn_func(query[None], key[None], value[None], **options))[0].flatten(1)

    def _out(self, result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Keep the largest logits since the last `clip_qk`, where Megatron's optimizer step looks for them."""
        if isinstance(result, Tensor):
            return result
        out, largest = result
        before = self.current_max_attn_logits
        self.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)
        return out

    def _dropout_seed(self) -> int:
        """A number from the random state of Megatron's own attention dropout; every tp rank gets a different one."""
        with contextlib.nullcontext() if self.config.sequence_parallel else get_cuda_rng_tracker().fork():
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
            drawn = int(torch.randint(1 << 62, (), device=device))
        return (drawn + self.tp_group.rank() * 0x9E3779B97F4A7C15) % (1 << 63)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict:
        """The learnable sinks, sharded over tensor-parallel ranks, under the key of Megatron's own core attention."""
        return compat.sharded_parameters(self, prefix, {"softmax_offset": 0}, sharded_offsets, metadata, self.tp_group)


def _documents(lengths: tuple[int, ...], padded: int) -> tuple[list[int], list[int]]:
    """(cu_seqlens, cu_seqlens_padded) of rows with these lengths, each padded to `padded` tokens."""
    return [0, *itertools.accumulate(lengths)], [padded * i for i in range(len(lengths) + 1)]


# Megatron's attention masks, reduced to what tree attention needs to know of them. Core attention gets boolean tensors,
# True = hidden. A mask must be causal, or hide padding at the end of rows, or both: then the lengths of the rows
# describe it. All layers get the same tensor, so it is read once.


# whether the kernels apply the causal mask; with `arbitrary` the mask itself decides
CAUSAL = {
    AttnMaskType.causal: True,
    AttnMaskType.padding_causal: True,
    AttnMaskType.no_mask: False,
    AttnMaskType.padding: False,
}
# by type, the masks that it may come with: (whether the mask hides later keys, whether the kernels are to)
MASKS = {
    AttnMaskType.causal: [(True, True)],
    AttnMaskType.padding_causal: [(True, True), (False, True)],
    AttnMaskType.arbitrary: [(False, False), (True, True)],
}


class MaskRead(NamedTuple):
    """What a mask lets through."""

    causal: bool
    lengths: tuple[int, ...] | None = None
    """Number of keys of every batch row; None if no row is padded."""


def read_mask(
    mask: Tensor | None,
    mask_type: AttnMaskType,
    *,
    batch: int,
    num_queries: int,
    num_keys: int,
    ranks: comm.Ranks,
) -> MaskRead:
    """What this rank's part of a mask lets through, the same on all ranks.

    A mask is not read where Megatron-LM's data loader makes causal ones only (no --reset-attention-mask).

    Args:
        mask: bool [b or 1, 1, rows, columns], True = hidden, or None. rows: this rank's queries, or 1; columns: all
            keys of the sequence, or this rank's.
        num_queries, num_keys: of this rank's share, zigzag.
        ranks: they compare their results when they see a mask for the first time: two all-reduces of b numbers.
    Raises: ValueError on every rank for any other mask.
    """
    if mask is None:
        if mask_type not in CAUSAL:
            raise ValueError(f"attn_mask_type {mask_type} needs an attention_mask: pass one, or use another type")
        return MaskRead(CAUSAL[mask_type])
    if mask_type == AttnMaskType.causal and compat.loads_causal_masks():
        return MaskRead(True)
    return _read(mask, mask_type, batch, num_queries, num_keys, ranks)


@ReadOnce
def _read(
    mask: Tensor, mask_type: AttnMaskType, batch: int, num_queries: int, num_keys: int, ranks: comm.Ranks
) -> MaskRead:
    world, rank = ranks.size, ranks.rank
    total = num_keys * world
    q_pos, k_pos = (shard_positions(n * world, rank, world) for n in (num_queries, num_keys))
    if mask.dim() == 4 and mask.shape[-1] == total:
        k_pos = torch.arange(total)
    fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] == 1 and mask.shape[3] == len(k_pos)
    if mask.dtype != torch.bool or not fits or mask.shape[2] not in (1, num_queries):
        raise ValueError(
            f"attention_mask {mask.dtype} {tuple(mask.shape)}: expected bool [{batch} or 1, 1, {num_queries} or 1, "
            f"{total} or {num_keys}], True = hidden; pass None if nothing is padded"
        )
    shown = ~mask[:, 0]  # [b or 1, queries, keys]
    q_pos, k_pos = q_pos.to(mask.device), k_pos.to(mask.device)
    lengths = torch.where(shown.any(1), k_pos + 1, 0).amax(-1).expand(batch).contiguous()
    ranks.reduce(lengths, "max")
    unpadded = (k_pos < lengths[:, None])[:, None]
    earlier = k_pos[None] <= q_pos[:, None] if mask.shape[2] == num_queries else torch.ones_like(unpadded)
    empty = ~shown.any(-1, keepdim=True)
    differs = torch.stack([(~empty & (shown != x)).any() for x in (unpadded, unpadded & earlier)])
    differs = ranks.reduce(differs.to(torch.int32), "max").tolist()
    allowed = MASKS.get(mask_type, [(False, False)])
    for hides_later, causal in allowed:
        if not differs[hides_later]:
            tokens = tuple(lengths.tolist())
            return MaskRead(causal, None if set(tokens) == {total} else tokens)
    raise ValueError(
        f"attention_mask {tuple(mask.shape)} with attn_mask_type {mask_type} is neither the causal mask of this rank's "
        "rows nor padding at the end of rows: tree attention takes no other mask here. Documents that don't see each "
        "other are packed (packed_seq_params); tree_attn_func takes any mask that is made of ranges"
    )
