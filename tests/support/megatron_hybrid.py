"""Megatron's hybrid MambaModel on CPU ranks: its own code, with the kernels of mamba_ssm written in torch.

    check(2, [Case(cp=2, install=True)], run=functools.partial(run_hybrid, pattern="M*-M*-"))

`pattern` is Megatron's hybrid_override_pattern: M a Mamba layer, * attention, - an MLP.
"""

import contextlib
import functools
from unittest import mock

import torch
import torch.nn.functional as F

from megatron_tree.integrations import megatron as tree
from support.megatron_models import SEQ_LENGTH, VOCAB, forward_backward, set_weights, transformer_config

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


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv_weight, conv_bias, dt_bias, A, *, D, headdim, ngroups, seq_idx=None, **options
):
    """Convolution, recurrence and gate of Mamba 2, token by token: [b, l, ...] -> [b, l, heads * headdim]."""
    assert seq_idx is None and not options["norm_before_gate"] and options["activation"] == "silu"
    heads, length = len(A), zxbcdt.shape[1]
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split((inner, len(conv_weight), heads), -1)
    conv = F.conv1d(xbc.transpose(1, 2), conv_weight[:, None], conv_bias, padding=3, groups=len(conv_weight))
    x, b, c = F.silu(conv[..., :length].transpose(1, 2)).tensor_split((inner, (inner + len(conv_weight)) // 2), -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (v.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for v in (b, c))
    dt = F.softplus(dt + dt_bias)
    state, out = x.new_zeros(*x[:, 0].shape, b.shape[-1]), []
    for t in range(length):
        new = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = state * torch.exp(dt[:, t] * A)[..., None, None] + new
        out.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1).flatten(2) * F.silu(z)


@contextlib.contextmanager
def mamba_in_torch():
    """Context in which Megatron builds and runs Mamba layers without mamba_ssm."""
    from megatron.core.ssm import mamba_mixer

    with contextlib.ExitStack() as stack:
        for name, value in {
            "HAVE_MAMBA_SSM": True,
            "ExtendedRMSNorm": GroupedRMSNorm,
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


def build_hybrid(case, pattern):
    """The MambaModel of this rank, with the weights of `set_weights`."""
    from megatron.core.models.mamba import MambaModel

    spec = stack_spec()
    if case.is_tree and not case.install:
        spec = tree.use_tree_attention(spec, tree_config=case.tree_config)
    model = MambaModel(
        config=transformer_config(case, num_layers=len(pattern), **SIZES),
        mamba_stack_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ_LENGTH,
        hybrid_override_pattern=pattern,
        position_embedding_type=case.positions,
    )
    cores = [module for name, module in model.named_modules() if name.endswith(".core_attention")]
    assert len(cores) == pattern.count("*")
    assert all(isinstance(core, tree.TreeDotProductAttention) == case.is_tree for core in cores)
    set_weights(model)
    return model


def run_hybrid(case, pattern):
    """As `forward_backward`."""
    with mamba_in_torch():
        return forward_backward(case, build=functools.partial(build_hybrid, pattern=pattern))
