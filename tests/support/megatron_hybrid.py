"""Megatron's hybrid models on CPU ranks: its own code, with the kernels of mamba_ssm written in torch.

    check(2, [Case(cp=2, install=True)], run=functools.partial(run_hybrid, pattern="M*-M*-"))

`pattern` is Megatron's hybrid_override_pattern, of a MambaModel: M a Mamba layer, * attention, - an MLP. With a G in it
it is that of a GPTModel: G a gated delta net and an MLP, * attention and an MLP.
"""

import contextlib
import functools
from unittest import mock

import torch
import torch.nn.functional as F

from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron import compat
from support.megatron_models import SEQ_LENGTH, VOCAB, forward_backward, set_weights, transformer_config
from support.megatron_release import GDN, gated_delta_net_block, gated_delta_net_in_torch

SIZES = {"mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_dim": 4, "mamba_num_groups": 4}


class GroupedRMSNorm(torch.nn.Module):
    """RMS norm of groups of channels; with `z` of y * silu(z)."""

    def __init__(self, channels, *, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        assert not norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, y, z=None):
        y = y if z is None else y * F.silu(z)
        groups = y.unflatten(-1, (-1, self.group_size))
        return (groups * (groups.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, *, D, dt_bias, dt_softplus, initial_states=None, return_final_states=False, **others
):
    """The scan of Mamba 2 in one chunk: x [b, l, h, p], B and C [b, l, g, n] -> [b, l, h, p](, states [b, h, p, n])."""
    assert dt_softplus and not any(others.values()), others
    dtype, (x, dt, B, C) = x.dtype, (part.to(torch.promote_types(part.dtype, A.dtype)) for part in (x, dt, B, C))
    dt = F.softplus(dt + dt_bias)
    B, C = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (B, C))
    total = (dt * A).cumsum(1)  # [b, l, h]
    later = torch.ones(2 * total.shape[1:2], dtype=torch.bool).tril()
    decay = (total[:, :, None] - total[:, None]).masked_fill(~later[..., None], -torch.inf).exp()  # [b, l, s, h]
    out = torch.einsum("blhn,bshn,blsh,bsh,bshp->blhp", C, B, decay, dt, x) + D.view(len(A), -1) * x
    states = torch.einsum("bshn,bsh,bshp->bhpn", B, (total[:, -1:] - total).exp() * dt, x)
    if initial_states is not None:
        out = out + torch.einsum("blhn,blh,bhpn->blhp", C, total.exp(), initial_states)
        states = states + total[:, -1, :, None, None].exp() * initial_states
    return (out.to(dtype), states) if return_final_states else out.to(dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv_weight, conv_bias, dt_bias, A, *, D, headdim, ngroups, chunk_size, seq_idx=None, **options
):
    """Convolution, scan and gate of Mamba 2: [b, l, ...] -> [b, l, heads * headdim]; seq_idx [1, l]: documents."""
    assert not options["norm_before_gate"] and options["activation"] == "silu"
    if seq_idx is not None:
        arguments = dict(D=D, headdim=headdim, ngroups=ngroups, chunk_size=chunk_size, **options)
        documents = zxbcdt.split(seq_idx[0].bincount().tolist(), 1)
        run = functools.partial(mamba_split_conv1d_scan_combined, **arguments)
        return torch.cat([run(x, conv_weight, conv_bias, dt_bias, A) for x in documents if x.shape[1]], 1)
    heads, length, width = len(A), zxbcdt.shape[1], conv_weight.shape[1]
    inner = zxbcdt.shape[2] - len(conv_weight) - heads
    z, xbc, dt = zxbcdt.split((inner, len(conv_weight), heads), -1)
    padding = dict(padding=width - 1, groups=len(conv_weight))
    conv = F.conv1d(xbc.transpose(1, 2), conv_weight[:, None], conv_bias, **padding)
    x, b, c = F.silu(conv[..., :length].transpose(1, 2)).tensor_split((inner, (inner + len(conv_weight)) // 2), -1)
    x, (b, c) = x.unflatten(-1, (heads, -1)), (v.unflatten(-1, (ngroups, -1)) for v in (b, c))
    out = mamba_chunk_scan_combined(x, dt, A, b, c, chunk_size, D=D, dt_bias=dt_bias, dt_softplus=True)
    return out.flatten(2) * F.silu(z)


@contextlib.contextmanager
def mamba_in_torch():
    """Context in which Megatron builds and runs Mamba layers without mamba_ssm."""
    from megatron.core.ssm import mamba_mixer

    with contextlib.ExitStack() as stack:
        for name, value in {
            "HAVE_MAMBA_SSM": True,
            "ExtendedRMSNorm": GroupedRMSNorm,
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        }.items():
            stack.enter_context(mock.patch.object(mamba_mixer, name, value, create=True))
        yield


def stack_spec():
    """Megatron's spec of a hybrid stack, with layers of its own instead of TransformerEngine's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    own = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=ModuleSpec(module=MambaMixer, submodules=mixer), mamba_bda=get_bias_dropout_add
    )
    attention = TransformerLayerSubmodules(
        input_layernorm=own.input_layernorm, self_attention=own.self_attention, self_attn_bda=own.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=own.pre_mlp_layernorm, mlp=own.mlp, mlp_bda=own.mlp_bda)
    return ModuleSpec(
        module=MambaStack,
        params={"post_layer_norm": False},  # Megatron's is TransformerEngine's, whatever the spec
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


def _model(case, pattern):
    """The MambaModel or GPTModel of this rank."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.mamba import MambaModel

    is_gated = "G" in pattern
    sizes = GDN if is_gated else SIZES
    config = transformer_config(case, num_layers=len(pattern), **{**sizes, **dict(case.extra)})
    spec = gated_delta_net_block(pattern) if is_gated else stack_spec()
    if config.sequence_parallel:
        spec = tree.use_sequence_parallel_norm(spec)
    if case.is_tree and not case.install:
        spec = tree.use_tree_attention(spec, tree_config=case.tree_config)
    options = dict(config=config, vocab_size=VOCAB, max_sequence_length=SEQ_LENGTH)
    options["position_embedding_type"] = case.positions
    if is_gated:
        return GPTModel(transformer_layer_spec=spec, share_embeddings_and_output_weights=False, **options)
    return MambaModel(mamba_stack_spec=spec, hybrid_override_pattern=pattern, **options)


def build_hybrid(case, pattern):
    """The model of this pattern, with the weights of `set_weights`."""
    from megatron.core.transformer.module import Float16Module

    model = _model(case, pattern)
    cores = [module for name, module in model.named_modules() if name.endswith(".core_attention")]
    assert len(cores) == pattern.count("*")
    assert all(isinstance(core, tree.TreeDotProductAttention) == case.is_tree for core in cores)
    mixers = [module for module in model.modules() if compat.is_recurrent(module)]
    assert len(mixers) == pattern.count("M") + pattern.count("G")
    kinds = case.cp_comm_type if isinstance(case.cp_comm_type, tuple) else [case.cp_comm_type] * len(pattern)
    kinds = [kind for kind, letter in zip(kinds, pattern, strict=True) if letter in "MG"]
    with_tree = [getattr(mixer, "has_tree", False) for mixer in mixers]
    assert with_tree == [case.is_tree and kind == "tree" for kind in kinds]
    set_weights(model)
    return Float16Module(model.config, model) if case.dtype == torch.bfloat16 else model


@contextlib.contextmanager
def mixers_in_torch():
    """Context in which Megatron builds and runs both kinds of recurrent layers without their packages."""
    with mamba_in_torch(), gated_delta_net_in_torch():
        yield


def run_hybrid(case, pattern):
    """As `forward_backward`."""
    with mixers_in_torch():
        return forward_backward(case, build=functools.partial(build_hybrid, pattern=pattern))
