"""TorchTitan's language models with tree attention: packed documents over context-parallel ranks.

    from megatron_tree.integrations.torchtitan import with_tree_attention
    config.model_spec = with_tree_attention(config.model_spec)      # a Trainer.Config, as of a config_registry

TorchTitan cuts the batch (parallelism.context_parallel_degree) and gives positions that start again at 0 with every
document. Tree attention is the inner attention of each layer; a hook of the model finds the documents once per step.
Sources: models/common/attention.py, distributed/context_parallel/api.py and protocols/ of torchtitan 0.3, which needs
parallelism.spmd_backend="partial_dtensor", and of its main branch at b5bcd76 (August 2026), whose batches have no
dimension of their own ([tokens]) and whose context parallelism needs "spmd_types", the default there, and torch 2.14.
"""

from __future__ import annotations

import contextlib
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
    from torchtitan.distributed import context_parallel
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError("megatron_tree.integrations.torchtitan needs torchtitan 0.3: pip install torchtitan") from error

LAYOUTS = {"headtail": "zigzag", None: "contiguous"}
IS_FOLDED = hasattr(context_parallel, "validate_cp_backend")  # later than 0.3
SPMD_BACKEND = "spmd_types" if IS_FOLDED else "partial_dtensor"  # that leaves k and v as they are
_InnerAttention = Module if IS_FOLDED else ScaledDotProductAttention  # which 0.3 cuts, and later ones refuse to


class TreeAttention(_InnerAttention):
    """Inner attention: q, k, v [b, s/p, h, d] or [s/p, h, d] of this rank to out of q's shape; see `tree_attn_func`."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(_InnerAttention.Config):
        tree_config: TreeConfig | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(*(() if IS_FOLDED else (config,)))
        self.tree_config = config.tree_config
        self.cp_group, self.layout = None, "zigzag"

    @comm.outside_graphs
    def forward(
        self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks: Documents, scale=None, enable_gqa=False, **others
    ) -> Tensor:
        others = [name for name, value in others.items() if value is not None]
        if others:
            raise ValueError(f"tree attention inside torchtitan does not take {others}: use the model's own attention")
        with _unchecked(q_BLNH) as checked:
            q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in (q_BLNH, k_BLNH, v_BLNH))
            options = dict(cp_group=self.cp_group, softmax_scale=scale, layout=self.layout, config=self.tree_config)
            shape, (q, k, v) = q.shape, (x.view(-1, *x.shape[-3:]) for x in (q, k, v))
            if attention_masks.bounds is None:
                out = tree_attn_func(q, k, v, **options)
            else:
                rows = zip(q, k, v, attention_masks.bounds, strict=True)
                out = [tree_attn_varlen_func(*row, cu_seqlens=bounds, **options) for *row, bounds in rows]
                out = torch.stack(out)
            out = out.view(*shape[:-1], -1)
        return checked(out)


@contextlib.contextmanager
def _unchecked(like: Tensor):
    """Without spmd_types' checks of operations, which know none of ours; gives a function that says of a result that it
    is cut as `like` is, where they are on."""
    if not IS_FOLDED:
        yield lambda out: out
        return
    import spmd_types as spmd
    from spmd_types.runtime import get_partition_spec

    def checked(out: Tensor) -> Tensor:
        if spmd.is_type_checking():
            spmd.assert_type(out, spmd.get_local_type(like), get_partition_spec(like))
        return out

    with spmd.no_typecheck():
        yield checked


class Documents:
    """Where documents begin in each row of a batch, the same on all ranks; a folded batch is one row.

    bounds: for each row a tensor [n + 1], from 0 to s; None: every row is one document.
    """

    def __init__(self, positions: Tensor):
        """positions: [b, s] or [s], 0 where a document begins."""
        positions = positions.view(-1, positions.shape[-1])
        starts, (rows, seq_len) = positions == 0, positions.shape
        starts[:, 0] = True
        self.bounds = None
        if starts.sum() > rows:
            self.bounds = [torch.tensor([*row.nonzero().flatten().tolist(), seq_len]) for row in starts.cpu()]


def with_tree_attention(spec: ModelSpec, *, tree_config: TreeConfig | None = None) -> ModelSpec:
    """The same model with tree attention in the place of flex or varlen attention.

    Raises: ValueError for a model whose mask is not TorchTitan's mask of documents (windows, sinks), and, when it is
        parallelized, for another spmd_backend than `SPMD_BACKEND` or another load balancer than "headtail" or None.
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
            if parallelism.spmd_backend != SPMD_BACKEND:
                raise ValueError(
                    f"spmd_backend={parallelism.spmd_backend!r}: tree attention needs {SPMD_BACKEND!r} with this "
                    "release of torchtitan"
                )
            balancer = parallelism.context_parallel_load_balancer
            if balancer not in LAYOUTS:
                raise ValueError(f"context_parallel_load_balancer={balancer!r}: pass 'headtail' or None")
            group, layout = comm.process_group(parallel_dims.get_mesh("cp")), LAYOUTS[balancer]
        for module in model.modules():
            if isinstance(module, TreeAttention):
                module.cp_group, module.layout = group, layout
                if IS_FOLDED:  # else k and v would be gathered for it
                    module._sharding_config = None

        def find_documents(model, args, kwargs):
            if kwargs.get("positions") is None:
                raise ValueError("positions is missing: tree attention finds the documents in it; pass it by its name")
            positions = kwargs["positions"]
            with _unchecked(positions):
                documents = Documents(unshard_sequence(positions, group, positions.dim() - 1, layout))
            return args, {**kwargs, "attention_masks": documents}

        model.register_forward_pre_hook(find_documents, with_kwargs=True)
        return spec.parallelize_fn(model, parallel_dims=parallel_dims, parallelism=parallelism, **others)

    return dataclasses.replace(spec, model=model, parallelize_fn=parallelize)
