"""A KV cache whose tokens are distributed over the ranks of a group: any number of rows, in pages."""

from .pages import CACHE_DTYPES, LayerPages, quantize
from .rows import Append, RowBook
from .sharded import ShardedCache, View

__all__ = ["CACHE_DTYPES", "Append", "LayerPages", "RowBook", "ShardedCache", "View", "quantize"]
