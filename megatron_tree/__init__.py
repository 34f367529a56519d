"""Tree Attention for Megatron-core and DeepSpeed: exact attention over a sequence sharded across ranks."""

from .core.attention.decode import tree_decode
from .core.attention.decode_select import tree_select
from .core.attention.functional import tree_attn_func, tree_attn_varlen_func
from .core.attention.prefill import tree_prefill
from .core.attention.selection import tree_select_func
from .core.attention.sequences import dispatch_documents, dispatch_prefix_tree, shard_sequence, unshard_sequence
from .core.config import TreeConfig
from .core.errors import CommError, TreeError
from .core.layout import PrefixTree, document_positions, packed_layout, prefix_tree, shard_positions
from .core.recurrence.halo import tree_convolution, tree_halo
from .core.recurrence.layer import Decay, tree_recurrence
from .core.recurrence.scan import tree_scan
from .core.spec import AttnSlice

__version__ = "0.1.0"


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
