"""Queries, keys and values of a served GPTModel with more tensor-parallel ranks than KV heads.

Then several ranks hold one KV head's projection. Megatron's layer gathers all heads' projections on all ranks and keeps
the queries of local heads, which attention over the cache would gather again. While the model is served, only the ranks
that have the same KV head gather, and each keeps all queries of that head.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ...core.cache.weight_gathering import current_pass
from ...core.comm import Ranks
from .attention import serving


def gather_projections_once(model: Any) -> None:
    """Change a GPTModel's self attention; outside of a `ServedPass` it is unchanged."""
    for layer in model.decoder.modules():
        if hasattr(layer, "linear_qkv") and hasattr(layer, "core_attention"):
            project = layer.get_query_key_value_tensors
            layer.get_query_key_value_tensors = functools.partial(_project_head_group, layer, project)


def _project_head_group(layer: Any, project, hidden: Tensor, key_value_states=None, **options):
    """q [s, b, heads of the KV head, d], and its k and v [s, b, 1, d]."""
    served = serving.get()
    split = served is not None and served.forward.head_shares is not None and current_pass.get() is None
    if not split or options.get("output_gate") or not options.get("split_qkv", True):
        return project(hidden, key_value_states, **options)
    config, (local, _) = layer.core_attention.tree_config, layer.linear_qkv(hidden)
    ranks = Ranks.of(served.forward.cp_group, local.device, config)
    whole = ranks.gather(local.movedim(-1, 0).contiguous()).movedim(0, -1)
    heads = whole.unflatten(-1, (-1, layer.hidden_size_per_attention_head))
    query, key, value = heads.split((heads.shape[2] - 2, 1, 1), 2)
    if layer.q_layernorm is not None:
        query = layer.q_layernorm(query)
    if layer.k_layernorm is not None:
        key = layer.k_layernorm(key)
    return query, key, value
