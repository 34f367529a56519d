"""Layer specs, the plugin, the CPU shim, and what TreeDotProductAttention refuses. No ranks: one process, no groups."""

import dataclasses
import functools

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_tree import TreeConfig, TreeError
from megatron_tree.integrations import megatron as tree
from support.core_attention import core_attention

causal, no_mask = AttnMaskType.causal, AttnMaskType.no_mask


def core_of(layer_spec):
    return layer_spec.submodules.self_attention.submodules.core_attention


# --- specs ---


def test_spec_walk_is_idempotent():
    pinned = TreeConfig(grid=(2, 2))
    once = tree.use_tree_attention(gpt_layer_specs.get_gpt_layer_local_spec(), tree_config=pinned)
    assert tree.use_tree_attention(once) is once
    assert tree.use_tree_attention(once, tree_config=pinned) is once
    other = tree.use_tree_attention(once, tree_config=TreeConfig(schedule="ring"))
    assert core_of(other).params == {"tree_config": TreeConfig(schedule="ring")}
    assert core_of(once).params == {"tree_config": pinned}


def test_spec_walk_goes_everywhere():
    @dataclasses.dataclass
    class Block:
        layer_specs: list
        norm: object = None

    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    mla = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True)
    partial = functools.partial(TransformerLayer, layer.submodules, hidden_dropout=0.0)
    nested = functools.partial(TransformerLayer, submodules=layer.submodules)
    block = Block(layer_specs=[layer, layer, mla, partial, nested, (layer,)])
    wrapped = ModuleSpec(module=TransformerLayer, params={"inner": block})
    result = tree.use_tree_attention(wrapped).params["inner"].layer_specs
    first, second, third, fourth, fifth, sixth = result
    assert first is second, "a spec used twice stays one object"
    submodules = [first.submodules, third.submodules, fourth.args[0], fifth.keywords["submodules"], sixth[0].submodules]
    for item in submodules:
        assert item.self_attention.submodules.core_attention.module is tree.TreeDotProductAttention
    assert fourth.func is TransformerLayer
    assert fourth.keywords == {"hidden_dropout": 0.0}
    assert all(core_of(spec) is DotProductAttention for spec in (layer, mla)), "they stay as they are"
    assert first.submodules.mlp is layer.submodules.mlp


@pytest.mark.refuses("a spec without core attention and recurrent layers", when="use_tree_attention is called")
def test_spec_without_attention_is_an_error():
    with pytest.raises(ValueError, match="no core_attention and no recurrent layer found"):
        tree.use_tree_attention(ModuleSpec(module=TransformerLayer))


@pytest.mark.refuses("a core attention with submodules (no plain attention)", when="use_tree_attention is called")
def test_core_attention_of_another_kind_is_not_replaced():
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    core = ModuleSpec(module=DotProductAttention, submodules=object())
    spec.submodules.self_attention.submodules.core_attention = core
    with pytest.raises(ValueError, match="it is not plain dense attention"):
        tree.use_tree_attention(spec)


# --- plugin ---


def test_plugin_is_idempotent_and_reversible():
    classes = (Attention, MultiLatentAttention, TransformerLayer)
    before = [cls.__init__ for cls in classes]
    tree.uninstall()
    for _ in range(2):
        tree.install()
        tree.install(tree_config=TreeConfig(grid=(1, 2)))
        assert tree.is_installed()
        assert Attention.__init__ is not before[0]
        tree.uninstall()
        tree.uninstall()
        assert not tree.is_installed()
        assert [cls.__init__ for cls in classes] == before


def test_plugin_does_not_drop_a_later_patch(monkeypatch):
    tree.install()
    ours = Attention.__init__
    monkeypatch.setattr(Attention, "__init__", lambda self: None)
    with pytest.raises(TreeError, match=r"Attention\.__init__ was replaced"):
        tree.uninstall()
    monkeypatch.setattr(Attention, "__init__", ours)
    tree.uninstall()
    assert not tree.is_installed()


def test_plugin_names_what_a_release_lacks(monkeypatch):
    with monkeypatch.context() as older:
        older.delattr("megatron.core.transformer.multi_latent_attention.MultiLatentAttention")
        with pytest.raises(tree.UnsupportedMegatronError, match=r"multi_latent_attention:MultiLatentAttention"):
            tree.install()
    monkeypatch.setattr("megatron.core.package_info.MINOR", 5)
    with pytest.raises(tree.UnsupportedMegatronError, match=r"too old: 0\.16 or newer"):
        tree.install()
    assert not tree.is_installed()


# --- the CPU shim ---


def test_cpu_shim_is_undone():
    import megatron.core.tensor_parallel.random as megatron_random

    places = [
        (torch.cuda, "current_device"),
        (torch.cuda, "manual_seed"),
        (torch.Tensor, "cuda"),
        (torch.Tensor, "type"),
    ]
    places += [(torch, "zeros"), (torch, "empty"), (torch.nn.Module, "cuda"), (megatron_random, "_get_cuda_rng_state")]
    before = [getattr(owner, name) for owner, name in places]
    x = torch.zeros(2)

    def inside():
        with tree.megatron_on_cpu() as active:
            assert active == (not torch.cuda.is_available())
            if active:
                assert x.cuda() is x
                assert x.type() == "torch.cuda.FloatTensor"
                assert x.type(torch.float64).dtype == torch.float64
                assert torch.zeros(1, device="cuda:0").device.type == "cpu"
                assert torch.empty(1, device="meta").device.type == "meta"
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert [getattr(owner, name) for owner, name in places] == before


# --- a TreeConfig from a file ---


@pytest.mark.supports("a TreeConfig from a file (MEGATRON_TREE_CONFIG)", with_="spec, install(), patch")
def test_a_file_reaches_every_way_in(tmp_path, monkeypatch):
    """Layers of the spec, of install() and of the patch take it; a TreeConfig that is passed wins."""
    (tmp_path / "tree.yaml").write_text("grid: 2x2\nbackend: reference\n")
    monkeypatch.setenv("MEGATRON_TREE_CONFIG", str(tmp_path / "tree.yaml"))
    expected, layer = TreeConfig(grid=(2, 2), backend="reference"), gpt_layer_specs.get_gpt_layer_local_spec()
    options = {"options": {"context_parallel_size": 4}}

    def built(spec):
        return core_attention(**options, **getattr(spec, "params", {})).tree_config

    assert built(core_of(tree.use_tree_attention(layer))) == expected
    assert built(core_of(tree.get_gpt_layer_tree_spec())) == expected
    assert built(tree.core_attention_for_tree(DotProductAttention)) == expected, "the patch"
    pinned = TreeConfig(grid=(4, 1))
    assert built(core_of(tree.use_tree_attention(layer, tree_config=pinned))) == pinned
    tree.install()
    try:
        assert built(tree.core_attention_for_tree(DotProductAttention)) == expected
    finally:
        tree.uninstall()


def test_a_bad_file_is_refused_by_install(tmp_path, monkeypatch):
    (tmp_path / "bad.yaml").write_text("grid: 2x2\nkernels: aten\n")
    monkeypatch.setenv("MEGATRON_TREE_CONFIG", str(tmp_path / "bad.yaml"))
    with pytest.raises(ValueError, match="bad.yaml': unknown key 'kernels': choose from schedule, grid"):
        tree.install()
    assert not tree.is_installed()
