"""A TreeDotProductAttention without a model, and what it is called with."""

import types

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_tree.integrations import megatron as tree


class Group:
    def __init__(self, size, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def config(**options):
    defaults = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**{**defaults, "use_cpu_initialization": True, **options})


def core_attention(
    *, cp_group_size=None, layer_number=1, mask=AttnMaskType.causal, attention_type="self", options=None, **kwargs
):
    model = config(**(options or {}))
    groups = types.SimpleNamespace(tp=Group(1), cp=Group(cp_group_size or model.context_parallel_size))
    return tree.TreeDotProductAttention(model, layer_number, mask, attention_type, pg_collection=groups, **kwargs)


def qkv(s=6, b=2, heads=4, heads_kv=2, d=8, s_kv=None):
    shapes = [(s, b, heads, d)] + 2 * [(s if s_kv is None else s_kv, b, heads_kv, d)]
    return [torch.randn(shape) for shape in shapes]


def causal_mask(s):
    return torch.triu(torch.ones(1, 1, s, s, dtype=torch.bool), 1)
