"""Tree Attention for Megatron-core and DeepSpeed: exact attention over a sequence sharded across ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.attention.decode import tree_decode
    from .core.attention.functional import tree_attn_func, tree_attn_varlen_func
    from .core.attention.prefill import tree_prefill
    from .core.attention.selection import tree_select, tree_select_func
    from .core.attention.sequences import dispatch_documents, dispatch_prefix_tree, shard_sequence, unshard_sequence
    from .core.config import TreeConfig
    from .core.errors import CommError, TreeError
    from .core.layout import PrefixTree, document_positions, packed_layout, prefix_tree, shard_positions
    from .core.recurrence.halo import tree_convolution, tree_halo
    from .core.recurrence.layer import Decay, tree_recurrence
    from .core.recurrence.scan import tree_scan
    from .core.spec import AttnSlice

__version__ = "0.1.0"
_MODULES = {
    "core.attention.decode": "tree_decode",
    "core.attention.functional": "tree_attn_func tree_attn_varlen_func",
    "core.attention.prefill": "tree_prefill",
    "core.attention.selection": "tree_select tree_select_func",
    "core.attention.sequences": "dispatch_documents dispatch_prefix_tree shard_sequence unshard_sequence",
    "core.config": "TreeConfig",
    "core.errors": "CommError TreeError",
    "core.layout": "PrefixTree document_positions packed_layout prefix_tree shard_positions",
    "core.recurrence.halo": "tree_convolution tree_halo",
    "core.recurrence.layer": "Decay tree_recurrence",
    "core.recurrence.scan": "tree_scan",
    "core.spec": "AttnSlice",
}


def __getattr__(name: str):
    """A public name, imported when it is first used: torch is not loaded for what does without."""
    module = next((module for module, names in _MODULES.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def init_inference(model, **options):
    """A model for long contexts, its KV cache sharded over ranks: see `integrations.deepspeed.init_inference`."""
    from .integrations.deepspeed.inference import init_inference as init  # imports deepspeed

    return init(model, **options)


__all__ = [
    "AttnSlice",
    "CommError",
    "Decay",
    "PrefixTree",
    "TreeConfig",
    "TreeError",
    "dispatch_documents",
    "dispatch_prefix_tree",
    "document_positions",
    "init_inference",
    "packed_layout",
    "prefix_tree",
    "shard_positions",
    "shard_sequence",
    "tree_attn_func",
    "tree_attn_varlen_func",
    "tree_convolution",
    "tree_decode",
    "tree_halo",
    "tree_prefill",
    "tree_recurrence",
    "tree_scan",
    "tree_select",
    "tree_select_func",
    "unshard_sequence",
]
