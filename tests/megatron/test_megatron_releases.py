"""Differences between releases of Megatron-core, with stand-ins of their signatures; test_patches.py runs them."""

import dataclasses
import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm import gated_delta_net, mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_tree import TreeConfig
from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron import compat
from megatron_tree.integrations.megatron.fusions import fusion_options
from megatron_tree.integrations.megatron.gated_delta_net import TreeGatedDeltaNet
from support.core_attention import Group, config

causal = AttnMaskType.causal


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    """A name that a release lacks, or a package that one of its modules needs."""
    for path in ("megatron.core.config:no_such_name", "megatron.no_such_module:x"):
        with pytest.raises(compat.UnsupportedMegatronError, match=f"megatron-core .* has no {path}, which is needed"):
            compat.lookup(path)
    (tmp_path / "needs_more.py").write_text("import no_such_package.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(compat.UnsupportedMegatronError, match="needs_more imports .*: pip install no_such_package$"):
        compat.lookup("needs_more:x")


# --- the spec of Megatron-LM's --spec ---


def test_spec_option_follows_the_config():
    model = config(num_moe_experts=4, moe_layer_freq=[0, 1], normalization="RMSNorm", add_bias_linear=False)
    group = Group(1)
    dense, experts = compat.decoder_layer_specs(model, vp_stage=None, pp_group=group)
    assert dense.submodules.mlp.module is MLP
    assert experts.submodules.mlp.module is MoELayer
    rms = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    assert dense.submodules.input_layernorm is rms.input_layernorm
    mla = config(multi_latent_attention=True, qk_layernorm=True)
    spec, _ = compat.decoder_layer_specs(mla, vp_stage=None, pp_group=group)
    assert issubclass(spec.submodules.self_attention.module, MultiLatentAttention)


@pytest.mark.parametrize("option", ["heterogeneous_block_specs", "experimental_attention_variant"])
def test_spec_option_refuses_other_kinds_of_blocks(option):
    model = config()
    setattr(model, option, "dsa")
    with pytest.raises(ValueError, match=rf"{option}='dsa' with get_gpt_layer_tree_spec.*use install\(\)"):
        tree.get_gpt_layer_tree_spec.module(config=model, layer_number=1)


# --- the plugin, and what patched sources call ---


@pytest.fixture
def installed():
    tree.install()
    yield
    tree.uninstall()


class TEDotProductAttention:  # TransformerEngine's core attention, by its place in a spec; never built here
    pass


@dataclasses.dataclass
class Submodules:
    core_attention: object


@pytest.fixture
def newer_attention(monkeypatch):
    """Attention as of 0.17 to 0.19: two more arguments, and a builder where a module stood."""

    class NewerAttention:
        # fmt: off
        def __init__(self, config, submodules, layer_number, attn_mask_type, attention_type, cp_comm_type=None,
                     pg_collection=None, pp_layer_offset=None, name=None):
            # fmt: on
            self.core, self.name, self.offset = submodules.core_attention, name, pp_layer_offset

    monkeypatch.setattr("megatron.core.transformer.attention.Attention", NewerAttention)
    return NewerAttention


@pytest.mark.parametrize(
    ("core", "cp_comm_type", "replaced"),
    [
        (TEDotProductAttention, "tree", True),
        (ModuleSpec(module=TEDotProductAttention), "a2a+tree", True),
        (functools.partial(TEDotProductAttention), "tree", True),
        (TEDotProductAttention, "a2a+p2p", False),
    ],
)
def test_plugin_with_newer_signatures(newer_attention, installed, core, cp_comm_type, replaced):
    spec, newer = Submodules(core), {"pp_layer_offset": 3, "name": "layers.0"}
    layer = newer_attention(config(), spec, 1, causal, "self", cp_comm_type=cp_comm_type, **newer)
    assert (layer.name, layer.offset) == ("layers.0", 3)
    assert spec.core_attention is core, "the user's spec stays as it is"
    assert (layer.core.module is tree.TreeDotProductAttention) if replaced else (layer.core is core)


def test_plugin_refuses_an_attention_without_cp_comm_type(newer_attention, monkeypatch):
    monkeypatch.setattr(newer_attention, "__init__", lambda self, config, submodules: None)
    with pytest.raises(tree.UnsupportedMegatronError, match=r"NewerAttention takes no argument \['cp_comm_type'\]"):
        tree.install()
    assert not tree.is_installed()


def test_patched_megatron_keeps_what_a_spec_pins():
    pinned = ModuleSpec(module=tree.TreeDotProductAttention, params={"tree_config": TreeConfig(grid=(1, 2))})
    assert tree.core_attention_for_tree(pinned) is pinned
    assert tree.core_attention_for_tree(DotProductAttention).module is tree.TreeDotProductAttention
    with pytest.raises(ValueError, match="it is not plain dense attention"):
        build_module(tree.core_attention_for_tree(ModuleSpec(module=DotProductAttention, submodules=object())))


@pytest.mark.supports("hybrid models (MambaModel)", with_="a stack spec with a layer of every kind (0.18 on)")
def test_a_stack_with_a_layer_of_every_kind():
    """The spec of a hybrid stack has sparse attention in it: an error in models that use it, and only in these."""

    @dataclasses.dataclass
    class StackSubmodules:
        attention_layer: object
        dsa_layer: object

    sparse = ModuleSpec(module=DotProductAttention, submodules=object())
    spec = ModuleSpec(module=object, submodules=StackSubmodules(Submodules(TEDotProductAttention), Submodules(sparse)))
    result = tree.use_tree_attention(spec)
    assert spec.submodules.dsa_layer.core_attention is sparse
    assert result.submodules.attention_layer.core_attention.module is tree.TreeDotProductAttention
    assert tree.use_tree_attention(result) is result
    with pytest.raises(ValueError, match="DotProductAttention.* has submodules of its own, so it is not plain dense"):
        build_module(result.submodules.dsa_layer.core_attention, config=config(), layer_number=1)


# --- what differs between releases ---


@pytest.mark.parametrize("kernel", ["causal_conv1d_fn", "causal_conv1d"])
def test_convolutions_of_what_is_installed(kernel, monkeypatch):
    """causal_conv1d's (0.16, 0.17 and Mamba) or fla's (gated delta nets from 0.18 on), but in deterministic mode."""
    weight, bias, calls = torch.randn(6, 1, 4), torch.randn(6), []

    def fused(x, weight, bias, activation):
        calls.append(kernel)
        assert x.is_contiguous() and activation == "silu"
        x = x if kernel == "causal_conv1d_fn" else x.transpose(1, 2)
        out = F.silu(F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=6))
        return out if kernel == "causal_conv1d_fn" else (out.transpose(1, 2), None)

    class Mixer(GatedDeltaNet):
        def __init__(self, deterministic):
            torch.nn.Module.__init__(self)
            self.activation, self.config = "silu", types.SimpleNamespace(deterministic_mode=deterministic)

    monkeypatch.setattr(gated_delta_net, kernel, fused, raising=False)
    x = torch.randn(2, 9, 6)
    outs = [compat.short_convolution(Mixer(plain), weight, bias, F.silu)(x) for plain in (False, True)]
    assert calls == [kernel]
    torch.testing.assert_close(*outs)


def test_the_dtype_of_states_that_newer_releases_pass(monkeypatch):
    class Mixer(mamba_mixer.MambaMixer):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.mamba_training_ssm_states_dtype = torch.float32

    scan = dict
    monkeypatch.setattr(mamba_mixer, "mamba_chunk_scan_combined", scan, raising=False)
    assert compat.chunk_scan(Mixer()) is scan
    monkeypatch.setattr(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", True, raising=False)
    assert compat.chunk_scan(Mixer())(x=1) == {"x": 1, "state_dtype": torch.float32}


@pytest.mark.refuses("recompute_modules with gdn_norm_out (0.19)", when="the model is built")
def test_recomputation_of_the_norm_alone(monkeypatch):
    def init(self, *args, **kwargs):
        torch.nn.Module.__init__(self)
        self.recompute_norm_out = True

    monkeypatch.setattr(GatedDeltaNet, "__init__", init)
    groups = types.SimpleNamespace(tp=Group(1), cp=Group(2))
    with pytest.raises(ValueError, match="recompute_modules has 'gdn_norm_out'"):
        TreeGatedDeltaNet(config(context_parallel_size=2), None, pg_collection=groups)


def test_hierarchical_sizes(monkeypatch):
    """In the configuration, or of the parallel state."""
    model = types.SimpleNamespace(hierarchical_context_parallel_sizes=[2, 4])
    assert compat.hierarchical_sizes(model, Group(8)) == (2, 4)
    for sizes in (None, [8], [2, 2], [2, 2, 2], [-2, -4]):
        model.hierarchical_context_parallel_sizes = sizes
        with pytest.raises(ValueError, match="two sizes whose product is the 8 .*--hierarchical-context-parallel-siz"):
            compat.hierarchical_sizes(model, Group(8))
    groups = [Group(4), Group(2)]
    monkeypatch.setattr("megatron.core.parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", groups)
    assert compat.hierarchical_sizes(types.SimpleNamespace(), Group(8)) == (4, 2)
    assert compat.hierarchical_sizes(types.SimpleNamespace(), None) == (1, 1)


def test_batches_that_are_not_cut_document_by_document(monkeypatch):
    plain = types.SimpleNamespace(qkv_format="thd", local_cp_size=None, cp_group=None)
    group, own = Group(4), Group(2)
    assert compat.group_of_batch(None, group) is group
    assert compat.group_of_batch(plain, group) is group
    plain.local_cp_size, plain.cp_group = 2, own
    assert compat.group_of_batch(plain, group) is own
    plain.local_cp_size, plain.cp_group = 1, None
    assert compat.group_of_batch(plain, group) is None
    assert not compat.cuts_packed_rows_as_a_whole()
    arguments = types.SimpleNamespace(dataloader_inter_document_masking=True, sft=False)
    state = types.SimpleNamespace(_GLOBAL_ARGS=arguments)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", state)
    assert compat.cuts_packed_rows_as_a_whole()
    arguments.sft = True
    assert not compat.cuts_packed_rows_as_a_whole()


def test_fusions_of_what_is_installed(tmp_path, monkeypatch):
    """Nothing is imported: a package of such a name may be another one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not any(fusion_options().values())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name in ("transformer_engine", "fused_weight_gradient_mlp_cuda"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not to be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert [name for name, used in fusion_options().items() if not used] == ["masked_softmax_fusion"]
