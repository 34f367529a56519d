"""Diffusers' transformers over a sharded sequence: tree attention in the place of its ring and Ulysses attention.

    from megatron_tree.integrations.diffusers import enable_tree_attention
    enable_tree_attention(transformer, mesh["cp"])
    sample = transformer(hidden_states, timestep, encoder_hidden_states).sample      # the whole sequence on every rank

The model's own context-parallel plan says which inputs are cut, where outputs are joined, and which attention is over
the sharded sequence (in Wan not that over the prompt, which every rank has as a whole). Tokens of prompt and video
that are attended to together are cut one by one and lie side by side on a rank: bidirectional attention without a mask
doesn't depend on their order.
Source: ModelMixin.enable_parallelism and models/attention_dispatch.py of diffusers 0.42.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..core import comm
from ..core.attention.functional import tree_attn_func
from ..core.config import TreeConfig
from ..core.duals import has_tangents

try:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ContextParallelOutput
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
except ImportError as error:
    raise ImportError("megatron_tree.integrations.diffusers needs diffusers 0.42: pip install diffusers") from error

NATIVE = AttentionBackendName.NATIVE
HIDDEN = -3e4  # fits every dtype; times any usual softmax_scale it leaves a key the weight 0
FEATURES = 8  # attention kernels take head dims that are multiples of it


@dataclasses.dataclass
class TreeParallelConfig(ContextParallelConfig):
    """Diffusers' configuration of a sequence sharded over `mesh`, which is one-dimensional here."""

    tree_config: TreeConfig | None = None

    def setup(self, rank: int, world_size: int, device: torch.device, mesh: DeviceMesh) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._mesh = self._flattened_mesh = mesh


def enable_tree_attention(
    model: nn.Module, mesh: DeviceMesh, *, config: TreeConfig | None = None, cp_plan: dict | None = None
) -> None:
    """Shard the sequence inside a diffusers transformer over the ranks of `mesh`, with tree attention across them.

    Every rank passes the same whole inputs and gets the whole output, so all ranks compute the same loss; the gradient
    of a parameter is the sum over `mesh` of the ranks' gradients. The model can be differentiated backward, forward
    (torch.func.jvp) and one within the other.

    Args:
        model: a ModelMixin with attention backend "native" (diffusers' default), which stands for this package's.
        mesh: a 1-D DeviceMesh, for instance mesh["cp"].
        config: `TreeConfig` of the attention.
        cp_plan: as for `enable_parallelism`; default: the model's own.
    Raises: ValueError for a model without a plan or with another backend.
    """
    group = comm.process_group(mesh)
    if comm.group_size(group) == 1:
        return
    cp_plan = cp_plan or model._cp_plan
    if cp_plan is None:
        raise ValueError(f"{type(model).__name__} has no context-parallel plan: pass cp_plan=")
    active = _AttentionBackendRegistry.get_active_backend()[0]
    used = {
        getattr(getattr(module, "processor", None), "_attention_backend", None) or active for module in model.modules()
    }
    if used - {NATIVE}:
        raise ValueError(
            f"{type(model).__name__} uses attention backends {[AttentionBackendName(x).value for x in used]}: call "
            "set_attention_backend('native') before enable_tree_attention"
        )
    _register()
    outputs = {name: plan for name, plan in cp_plan.items() if not isinstance(plan, dict)}
    inputs = {name: plan for name, plan in cp_plan.items() if isinstance(plan, dict)}
    parallel = TreeParallelConfig(ring_degree=mesh.size(), mesh=mesh, tree_config=config)
    model.enable_parallelism(config=parallel, cp_plan=inputs)
    comm.forward_in_step(model, lambda kwargs: (group,))
    for name, plan in outputs.items():  # diffusers' own gather has no forward-mode derivative
        plan = [plan] if isinstance(plan, ContextParallelOutput) else plan
        model.get_submodule(name).register_forward_hook(functools.partial(_join, group, plan))


def _register() -> None:
    """Put `attend` before the function of backend "native", once. The names of backends are a closed enum.

    Attention to what every rank has as a whole stays torch's; with tangents, which torch's fused kernels don't take, it
    is `attend` on one rank.
    """
    native = _AttentionBackendRegistry._backends[NATIVE]
    if hasattr(native, "__wrapped__"):
        return

    @functools.wraps(native)
    def attend_or_native(query, key, value, *args, _parallel_config=None, **kwargs):
        parallel = getattr(_parallel_config, "context_parallel_config", None)
        if isinstance(parallel, TreeParallelConfig):
            sharded = dict(group=parallel.mesh, config=parallel.tree_config)
            return attend(query, key, value, *args, **sharded, **kwargs)
        plain = kwargs.get("attn_mask") is None and not kwargs.get("is_causal") and not kwargs.get("dropout_p")
        if _parallel_config is None and plain and has_tangents(query, key, value):
            return attend(query, key, value, *args, group=None, config=None, **kwargs)
        return native(query, key, value, *args, _parallel_config=_parallel_config, **kwargs)

    constraints = _AttentionBackendRegistry._constraints[NATIVE]
    _AttentionBackendRegistry.register(NATIVE, constraints, supports_context_parallel=True)(attend_or_native)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group,
    config: TreeConfig | None,
) -> Tensor:
    """Bidirectional attention of this rank's queries [b, s/p, h, d] to the keys of all ranks, [b, s_k/p, h_kv, d] each.

    attn_mask: of this rank's keys, the same for all queries: [b, s_k/p] or [b or 1, h or 1, 1, s_k/p], boolean (True:
        visible) or added to the scores.
    Raises: ValueError for dropout, a causal mask and a mask that differs between queries.
    """
    given = [name for name, value in (("dropout_p", dropout_p), ("is_causal", is_causal)) if value]
    if given:
        raise ValueError(f"tree attention inside diffusers does not take {' and '.join(given)}: leave it out")
    if attn_mask is not None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key = _with_key_bias(query, key, attn_mask, scale)
    options = dict(causal=False, softmax_scale=scale, layout="contiguous", config=config)
    return tree_attn_func(query, key, value, cp_group=group, **options)


def _with_key_bias(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A mask of keys as features of q and k: a 1 times the key's bias, so that it travels with the keys."""
    mask = mask[:, None, None] if mask.dim() == 2 else mask
    if mask.dim() != 4 or mask.shape[2] != 1 or mask.shape[3] != key.shape[1]:
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)} where a rank has {query.shape[1]} queries and {key.shape[1]} "
            "keys: pass one of the keys alone, [b, keys] or [b, heads, 1, keys]"
        )
    if mask.shape[1] not in (1, key.shape[2]):
        raise ValueError(f"attn_mask has {mask.shape[1]} heads, and the keys have {key.shape[2]}: pass 1 or as many")
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=key.dtype).masked_fill(~mask, HIDDEN)
    else:
        bias = (mask.to(torch.promote_types(mask.dtype, torch.float32)) / scale).clamp(min=HIDDEN)
    bias = bias.expand(key.shape[0], key.shape[2], 1, -1).permute(0, 3, 1, 2)  # [b, s_k/p, h_kv, 1]
    high = bias.to(key.dtype)
    low = (bias - high).to(key.dtype)  # what rounding to the keys' dtype has taken off
    one = torch.ones_like(query[..., :1])
    pad = (0, FEATURES - 2)
    features = (F.pad(torch.cat(pair, -1), pad) for pair in ((one, one), (high, low)))
    return tuple(torch.cat(pair, -1) for pair in zip((query, key), features))


@comm.outside_graphs
def _join(group, plan, module: nn.Module, inputs, output):
    """The forward hook of a module whose outputs are joined to the whole sequence, each along its plan's dim."""
    if isinstance(output, Tensor):
        return Gather.apply(output, plan[0].gather_dim, group)
    return tuple(x if to is None else Gather.apply(x, to.gather_dim, group) for x, to in zip(output, plan, strict=True))


class Gather(torch.autograd.Function):
    """Shards [..., s/p, ...] to the whole [..., s, ...] on every rank; backward, a rank's part of a gradient that all
    ranks have."""

    @staticmethod
    def forward(x: Tensor, dim: int, group) -> Tensor:
        ranks = comm.Ranks.of(group, x.device)
        with ranks.call("the gather of a diffusers output") as call:
            call.agree(shape=tuple(x.shape), dim=dim, dtype=x.dtype)
            return ranks.gather(x.movedim(dim, 0).contiguous()).movedim(0, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.dim, ctx.group = inputs

    @staticmethod
    def backward(ctx, dout: Tensor):
        return Take.apply(dout, ctx.dim, ctx.group), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_):
        return Gather.apply(tangent, ctx.dim, ctx.group)


class Take(torch.autograd.Function):
    """This rank's shard of what all ranks have: the transpose of `Gather`."""

    @staticmethod
    def forward(x: Tensor, dim: int, group) -> Tensor:
        return x.chunk(comm.group_size(group), dim)[comm.group_rank(group)].clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.dim, ctx.group = inputs

    @staticmethod
    def backward(ctx, dout: Tensor):
        return Gather.apply(dout, ctx.dim, ctx.group), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_):
        return Take.apply(tangent, ctx.dim, ctx.group)
