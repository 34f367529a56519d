"""Tree Attention for Megatron-core and DeepSpeed: exact attention over a sequence sharded across ranks."""

from .config import TreeConfig
from .errors import CommError, TreeError
from .functional import shard_sequence, tree_attn_func, tree_decode, unshard_sequence
from .shard import shard_positions

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "TreeConfig",
    "TreeError",
    "shard_positions",
    "shard_sequence",
    "tree_attn_func",
    "tree_decode",
    "unshard_sequence",
]
