"""Tree Attention for Megatron-core and DeepSpeed: exact attention over a sequence sharded across ranks."""

from .config import TreeConfig
from .errors import CommError, TreeError
from .functional import tree_attn_func, tree_attn_varlen_func, tree_decode
from .sequences import shard_sequence, unshard_sequence
from .shard import packed_layout, shard_positions

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "TreeConfig",
    "TreeError",
    "packed_layout",
    "shard_positions",
    "shard_sequence",
    "tree_attn_func",
    "tree_attn_varlen_func",
    "tree_decode",
    "unshard_sequence",
]
