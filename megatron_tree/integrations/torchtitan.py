"""TorchTitan's language models with tree attention: packed documents over context-parallel ranks.

    from megatron_tree.integrations.torchtitan import with_tree_attention
    config.model_spec = with_tree_attention(config.model_spec)      # a Trainer.Config, as of a config_registry
    config.parallelism.spmd_backend = "partial_dtensor"

TorchTitan cuts the batch (parallelism.context_parallel_degree) and gives positions that start again at 0 with every
document. Tree attention is the inner attention of each layer; a hook of the model finds the documents once per step.
Source: models/common/attention.py, distributed/context_parallel/api.py and protocols/ of torchtitan 0.3.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core import comm
from ..core.attention.functional import tree_attn_func, tree_attn_varlen_func
from ..core.attention.sequences import unshard_sequence
from ..core.config import TreeConfig

try:
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.model_spec import ModelSpec
except ImportError as error:
    raise ImportError("megatron_tree.integrations.torchtitan needs torchtitan 0.3: pip install torchtitan") from error

LAYOUTS = {"headtail": "zigzag", None: "contiguous"}


class TreeAttention(ScaledDotProductAttention):
    """Inner attention: q, k, v [b, s/p, h, d] of this rank to out [b, s/p, h, d]; see `tree_attn_func`."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        tree_config: TreeConfig | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.tree_config = config.tree_config
        self.cp_group, self.layout = None, "zigzag"

    @comm.outside_graphs
    def forward(
        self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks: Documents, scale=None, enable_gqa=False, **others
    ) -> Tensor:
        others = [name for name, value in others.items() if value is not None]
        if others:
            raise ValueError(f"tree attention inside torchtitan does not take {others}: use the model's own attention")
        q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in (q_BLNH, k_BLNH, v_BLNH))
        options = dict(cp_group=self.cp_group, softmax_scale=scale, layout=self.layout, config=self.tree_config)
        if attention_masks.bounds is None:
            return tree_attn_func(q, k, v, **options)
        rows = zip(q, k, v, attention_masks.bounds, strict=True)
        return torch.stack([tree_attn_varlen_func(*row, cu_seqlens=bounds, **options) for *row, bounds in rows])


class Documents:
    """Where documents begin in each row of a batch, the same on all ranks.

    bounds: for each row a tensor [n + 1], from 0 to s; None: every row is one document.
    """

    def __init__(self, positions: Tensor):
        """positions: [b, s], 0 where a document begins."""
        starts, (rows, seq_len) = positions == 0, positions.shape
        starts[:, 0] = True
        self.bounds = None
        if starts.sum() > rows:
            self.bounds = [torch.tensor([*row.nonzero().flatten().tolist(), seq_len]) for row in starts.cpu()]


def with_tree_attention(spec: ModelSpec, *, tree_config: TreeConfig | None = None) -> ModelSpec:
    """The same model with tree attention in the place of flex or varlen attention.

    Raises: ValueError for a model whose mask is not TorchTitan's mask of documents (windows, sinks), and, when it is
        parallelized, for another spmd_backend than "partial_dtensor" or another load balancer than "headtail" or None.
    """
    model = copy.deepcopy(spec.model)
    for layer in model.layers:
        if layer.attention is None:
            continue
        inner = getattr(layer.attention, "inner_attention", None)
        plain = isinstance(inner, (FlexAttention.Config, VarlenAttention.Config))
        if not plain or getattr(inner, "window_size", (-1, 0)) != (-1, 0):
            raise ValueError(f"{spec.name}: a layer's inner attention is {inner}, not causal flex or varlen attention")
        layer.attention.inner_attention = TreeAttention.Config(tree_config=tree_config)

    def parallelize(model: nn.Module, *, parallel_dims, parallelism, **others):
        if type(model).get_attention_masks is not Decoder.get_attention_masks:
            raise ValueError(f"{type(model).__name__} makes its own masks: tree attention makes the masks of documents")
        group, layout = None, "zigzag"
        if parallel_dims.cp_enabled:
            if parallelism.spmd_backend != "partial_dtensor":  # the others gather k and v before inner attention
                raise ValueError(
                    f"spmd_backend={parallelism.spmd_backend!r}: tree attention needs 'partial_dtensor', which later "
                    "releases than 0.3 refuse under context parallelism: pip install torchtitan==0.3.0"
                )
            balancer = parallelism.context_parallel_load_balancer
            if balancer not in LAYOUTS:
                raise ValueError(f"context_parallel_load_balancer={balancer!r}: pass 'headtail' or None")
            group, layout = comm.process_group(parallel_dims.get_mesh("cp")), LAYOUTS[balancer]
        for module in model.modules():
            if isinstance(module, TreeAttention):
                module.cp_group, module.layout = group, layout

        def find_documents(model, args, kwargs):
            if kwargs.get("positions") is None:
                raise ValueError("positions is missing: tree attention finds the documents in it; pass it by its name")
            documents = Documents(unshard_sequence(kwargs["positions"], group, 1, layout))
            return args, {**kwargs, "attention_masks": documents}

        model.register_forward_pre_hook(find_documents, with_kwargs=True)
        return spec.parallelize_fn(model, parallel_dims=parallel_dims, parallelism=parallelism, **others)

    return dataclasses.replace(spec, model=model, parallelize_fn=parallelize)
