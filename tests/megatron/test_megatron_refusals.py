"""What TreeDotProductAttention refuses: a ValueError that names the option, the values and the way out."""

import functools
import types

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron_tree import TreeConfig
from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron import TreeDotProductAttention
from megatron_tree.integrations.megatron.documents import check_cut
from megatron_tree.integrations.megatron.recurrent import ShardedMixer
from support.core_attention import Group, causal_mask, config, core_attention, qkv
from support_matrix import refused

when_built = functools.partial(refused, when="the model is built")
in_forward = functools.partial(refused, when="the forward")
padding = AttnMaskType.padding


@pytest.mark.refuses("cp_comm_type of another name", when="the model is built")
def test_unknown_cp_comm_type_says_what_there_is():
    with pytest.raises(ValueError, match="'p2p\\+a2a' is not supported.*'tree', 'p2p', 'all_gather'.*'a2a\\+tree'"):
        core_attention(cp_comm_type="p2p+a2a")


@pytest.mark.parametrize(
    ("kind", "cp", "message"),
    [
        ("tree", 1, "context_parallel_size=1 in the .* group of 2 ranks: set context_parallel_size=2, or leave"),
        (["p2p", "a2a+tree"], 1, "context_parallel_size=1 in the TransformerConfig"),
        ("treee", 2, "cp_comm_type='treee' is none of 'tree', .*; did you mean 'tree' instead of 'treee'"),
    ],
)
def test_models_whose_ranks_would_attend_alone(kind, cp, message):
    groups = types.SimpleNamespace(tp=Group(1), cp=Group(2))
    tree.install()
    try:
        with pytest.raises(ValueError, match=message):
            GPTModel(config(context_parallel_size=cp, cp_comm_type=kind), None, 8, 8, pg_collection=groups)
    finally:
        tree.uninstall()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        when_built("attention_type other than self and cross", {"attention_type": "linear"}, "attention_type='linear'"),
        when_built(
            "context_parallel_size other than the group's",
            {"options": {"context_parallel_size": 2}, "cp_group_size": 4},
            "context_parallel_size=2.*has 4 ranks",
        ),
        when_built(
            "a grid of another size than the ranks",
            {"options": {"context_parallel_size": 2}, "tree_config": TreeConfig(grid=(2, 2))},
            r"grid=\(2, 2\) has 4 places.*leaves 2",
        ),
        when_built(
            "cp_comm_type of two parts without hierarchical_context_parallel_sizes",
            {"options": {"context_parallel_size": 4}, "cp_comm_type": "a2a+tree"},
            "hierarchical_context_parallel_sizes=None.*4 context-parallel ranks",
        ),
        when_built(
            "more ranks that exchange heads (a2a) than query heads",
            {"options": {"context_parallel_size": 8}, "cp_comm_type": "a2a"},
            r"8 context-parallel ranks can't share 4 query heads \(cp_comm_type='a2a'; num_attention_heads=4",
        ),
        when_built("window_size that is no pair", {"options": {"window_size": 5}}, "window_size=5.*pair"),
        when_built("fp8_dot_product_attention", {"options": {"fp8_dot_product_attention": True}}, "fp8_dot_product"),
        when_built("arguments of newer releases that are set", {"some_new_option": 3}, "some_new_option, which"),
    ],
)
def test_constructor_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        core_attention(**kwargs)


def test_sequences_that_newer_releases_cut_otherwise_than_zigzag():
    """Their fields; a layer of Megatron's own, or one rank, takes any."""
    groups = types.SimpleNamespace(tp=Group(1), cp=Group(2))
    built = {
        "attention_cp_layout": lambda c: TreeDotProductAttention(
            c, 1, AttnMaskType.causal, "self", pg_collection=groups
        ),
        "linear_cp_layout": lambda c: ShardedMixer()._place(c, groups, "tree", None),
    }
    for name, layer in built.items():
        for field in (name, "cp_partition_mode"):
            model = config(context_parallel_size=2)
            setattr(model, field, "contiguous")
            with pytest.raises(ValueError, match=f"{field}='contiguous': .* set {field}='zigzag', or the cp_comm_type"):
                layer(model)
            setattr(model, field, "zigzag")
            layer(model)
    one = config()
    one.attention_cp_layout = "contiguous"
    built["attention_cp_layout"](one)
    packed = types.SimpleNamespace(cp_partition_mode="contiguous", prefix_tree=object())
    with pytest.raises(ValueError, match="cp_partition_mode='contiguous'"):
        check_cut(packed, None)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        in_forward(
            "packed_seq_params of another format than thd",
            {"packed_seq_params": PackedSeqParams(qkv_format="bshd")},
            "qkv_format='bshd'",
        ),
        in_forward(
            "packed_seq_params beside attention_mask",
            {"packed_seq_params": PackedSeqParams(qkv_format="thd"), "attention_mask": causal_mask(6)},
            "together with packed_seq_params",
        ),
        (
            {
                "packed_seq_params": PackedSeqParams(qkv_format="thd"),
                "attn_mask_type": AttnMaskType.causal_bottom_right,
            },
            "causal_bottom_right",
        ),
        in_forward("attention_bias", {"attention_bias": torch.zeros(1)}, "attention_bias is set"),
        in_forward(
            "attn_mask_type arbitrary without a mask",
            {"attn_mask_type": AttnMaskType.arbitrary},
            "attn_mask_type AttnMaskType.arbitrary",
        ),
        ({"attn_mask_type": padding, "attention_mask": causal_mask(6)}, "padding is neither the causal mask"),
        in_forward(
            "masks that are neither causal nor padding at the end",
            {"attention_mask": causal_mask(6).roll(1, -1)},
            "neither the causal mask",
        ),
        ({"attention_mask": causal_mask(8)}, r"\(1, 1, 8, 8\): expected bool \[2 or 1, 1, 6 or 1, 6 or 6\]"),
        ({"attention_mask": causal_mask(6).float()}, "float32.*expected bool"),
        ({"attention_mask": torch.tensor([1, 0, 0, 0, 0, 0]).bool()[None, None, None]}, "padding at the end of rows"),
        ({"some_new_option": 3}, "some_new_option, which tree attention does not support"),
    ],
)
def test_forward_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        core_attention()(*qkv(), **kwargs)


@pytest.mark.refuses("keys of another length in self attention (a KV cache)", when="the forward")
def test_forward_refuses_keys_of_another_length():
    with pytest.raises(ValueError, match="self attention"):
        core_attention()(*qkv(s=2, s_kv=6))
