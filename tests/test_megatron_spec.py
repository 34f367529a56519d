"""Layer specs, the plugin, the CPU shim, and what TreeDotProductAttention refuses. No ranks: one process, no groups."""

import dataclasses
import functools
import types

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_tree import TreeConfig, TreeError
from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations import megatron_compat as compat

causal, no_mask = AttnMaskType.causal, AttnMaskType.no_mask


def core_of(layer_spec):
    return layer_spec.submodules.self_attention.submodules.core_attention


class Group:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size

    def rank(self):
        return 0


def config(**options):
    defaults = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**{**defaults, "use_cpu_initialization": True, **options})


def core_attention(*, cp_group_size=None, layer_number=1, mask=causal, attention_type="self", options=None, **kwargs):
    model = config(**(options or {}))
    groups = types.SimpleNamespace(tp=Group(1), cp=Group(cp_group_size or model.context_parallel_size))
    return tree.TreeDotProductAttention(model, layer_number, mask, attention_type, pg_collection=groups, **kwargs)


def qkv(s=6, b=2, heads=4, heads_kv=2, d=8, s_kv=None):
    shapes = [(s, b, heads, d)] + 2 * [(s if s_kv is None else s_kv, b, heads_kv, d)]
    return [torch.randn(shape) for shape in shapes]


def causal_mask(s):
    return torch.triu(torch.ones(1, 1, s, s, dtype=torch.bool), 1)


# --- specs ---


def test_spec_is_copied_and_replaced():
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    result = tree.use_tree_attention(spec)
    assert core_of(spec) is DotProductAttention
    assert core_of(result).module is tree.TreeDotProductAttention
    assert result.submodules.mlp is spec.submodules.mlp
    assert type(result) is type(spec)


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
    assert all(core_of(spec) is DotProductAttention for spec in (layer, mla))


def test_spec_without_attention_is_an_error():
    with pytest.raises(ValueError, match="no core_attention found"):
        tree.use_tree_attention(ModuleSpec(module=TransformerLayer))


def test_core_attention_of_another_kind_is_not_replaced():
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=DotProductAttention, submodules=object()
    )
    with pytest.raises(ValueError, match="no plain dense attention"):
        tree.use_tree_attention(spec)


def test_gpt_layer_tree_spec_takes_megatrons_arguments():
    spec = tree.get_gpt_layer_tree_spec(
        qk_layernorm=True, normalization="RMSNorm", tree_config=TreeConfig(backend="reference")
    )
    local = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    assert (
        spec.submodules.self_attention.submodules.q_layernorm is local.submodules.self_attention.submodules.q_layernorm
    )
    assert core_of(spec).params["tree_config"].backend == "reference"


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
    monkeypatch.delattr("megatron.core.transformer.multi_latent_attention.MultiLatentAttention")
    with pytest.raises(tree.UnsupportedMegatronError, match=r"multi_latent_attention:MultiLatentAttention"):
        tree.install()
    assert not tree.is_installed()


def test_too_old_a_release_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("megatron.core.package_info.MINOR", 5)
    with pytest.raises(tree.UnsupportedMegatronError, match=r"too old: 0\.13 or newer"):
        tree.install()
    assert not tree.is_installed()


# --- TreeDotProductAttention ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, TreeConfig(backend="aten")),
        ("tree", TreeConfig(backend="aten")),
        ("p2p", TreeConfig(backend="aten", schedule="ring")),
        ("all_gather", TreeConfig(backend="aten", schedule="grid", grid=(1, 4))),
    ],
)
def test_cp_comm_type_chooses_the_schedule(name, expected):
    assert tree.tree_config_for(name, 4, TreeConfig(backend="aten")) == expected


def test_unknown_cp_comm_type_says_what_there_is():
    with pytest.raises(ValueError, match="'a2a\\+p2p' is not supported.*'tree', 'p2p', 'all_gather'"):
        core_attention(cp_comm_type="a2a+p2p")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"options": {"attention_dropout": 0.1}}, r"attention_dropout=0.1.*set attention_dropout=0.0"),
        ({"attention_dropout": 0.2}, "attention_dropout=0.2"),
        ({"attention_type": "cross"}, "attention_type='cross'"),
        ({"options": {"context_parallel_size": 2}, "cp_group_size": 4}, "context_parallel_size=2.*has 4 ranks"),
        (
            {"options": {"context_parallel_size": 2}, "tree_config": TreeConfig(grid=(2, 2))},
            r"grid=\(2, 2\) has 4 places.*is 2",
        ),
        ({"options": {"window_size": 5}}, "window_size=5.*pair"),
        ({"options": {"qk_clip": True}}, "qk_clip=True"),
        ({"some_new_option": 3}, "some_new_option, which megatron_tree does not know"),
    ],
)
def test_constructor_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        core_attention(**kwargs)


def test_newer_and_older_arguments_are_taken():
    model = config()
    groups = types.SimpleNamespace(tp=Group(1), cp=Group(1))
    kwargs = {"k_channels": 8, "v_channels": 4, "name": "decoder.layers.0", "some_new_option": None}
    module = tree.TreeDotProductAttention(model, 1, causal, "self", model_comm_pgs=groups, **kwargs)
    q, k, v = qkv()
    assert module(q, k, v[..., :4], None, num_splits=2).shape == (6, 2, 16)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"packed_seq_params": object()}, "packed_seq_params is set"),
        ({"attention_bias": torch.zeros(1)}, "attention_bias is set"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "attn_mask_type AttnMaskType.arbitrary"),
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type AttnMaskType.padding"),
        ({"attn_mask_type": no_mask, "attention_mask": causal_mask(6)}, "pass attention_mask=None"),
        ({"attention_mask": causal_mask(6).roll(1, -1)}, "is not the causal mask"),
        ({"attention_mask": causal_mask(8)}, "is not the causal mask"),
        ({"some_new_option": 3}, "some_new_option, which megatron_tree does not know"),
    ],
)
def test_forward_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        core_attention()(*qkv(), **kwargs)


def test_forward_refuses_keys_of_another_length():
    with pytest.raises(ValueError, match="self attention"):
        core_attention()(*qkv(s=2, s_kv=6))


def test_causal_mask_of_the_data_loader_is_accepted_but_not_trusted():
    module, tensors = core_attention(), qkv()
    mask = causal_mask(6)
    expected = module(*tensors)
    assert torch.equal(module(*tensors, mask), expected)
    mask[..., 3:, :3] = True  # what reset_attention_mask does: two documents
    with pytest.raises(ValueError, match="is not the causal mask"):
        module(*tensors, mask)


def dense(q, k, v, *, scale, hidden, sinks=None):
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (scale * q @ k.mT).masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    p = scores.softmax(-1)[..., : k.shape[2]]
    return (p @ v).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("layer_number", [1, 2])
@pytest.mark.parametrize("mask", [causal, no_mask])
def test_one_rank_equals_the_formula(softmax_type, layer_number, mask):
    options = {"softmax_type": softmax_type, "window_size": (2, 0), "window_attn_skip_freq": 2}
    module = core_attention(layer_number=layer_number, mask=mask, options=options, softmax_scale=0.3)
    assert module.window_size == ((2, 0) if layer_number == 1 else (-1, -1))
    q, k, v = qkv()
    i, j = torch.arange(6)[:, None], torch.arange(6)
    hidden = (j > i) if mask is causal else torch.zeros(6, 6, dtype=torch.bool)
    if layer_number == 1:
        hidden = hidden | (j < i - 2) | (j > i)
    expected = dense(q, k, v, scale=0.3, hidden=hidden, sinks=module.softmax_offset)
    torch.testing.assert_close(module(q, k, v).double(), expected, rtol=1e-5, atol=1e-6)


def test_list_of_cp_comm_types_is_found_by_a_one_based_index():
    model = types.SimpleNamespace(cp_comm_type=["tree", "p2p"])
    with compat.fixed_cp_comm_type_list(model):
        assert [model.cp_comm_type[layer_number] for layer_number in (1, 2)] == ["tree", "p2p"]
    assert model.cp_comm_type == ["tree", "p2p"]


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing with a GPU")
def test_cpu_shim_keeps_random_states_apart():
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker

    with tree.megatron_on_cpu():
        initialize_rng_tracker(force_reset=True)
        tracker = get_cuda_rng_tracker()
        tracker.add("model-parallel-rng", 5)
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        with tracker.fork():
            forked = torch.rand(3)
        assert torch.equal(torch.rand(3), expected)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), forked)
