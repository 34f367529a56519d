"""Transformers' layers with an index (DeepSeek V3.2 and relatives), each of whose queries sees the keys it selects.

Such a layer's indexer makes index queries, weights and index keys, scores all keys and returns the positions of those
with the largest scores, which the attention function gets as `indices`. It takes index keys from the cache
(`update_indexer`) and computes the scores in place. With attention "tree" what it gets from there is no tensor: a
`Scoring` notes queries and weights as they are multiplied with it, and has keys of the whole sequence selected where
the indexer asks for the largest. So rope, norms and scales remain the model's own, and the scores' formula is checked:
sum over heads of weight * relu(scale * q . k).

Models read the mask's shape before, so over these layers it is an `IndexMask`, which they hand on as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.selection import tree_select_func
from ...comm import outside_graphs
from .architectures import INDEXED, INSTEAD, model_class
from .batch_shards import SequenceShard


class IndexMask(NamedTuple):
    """What `tree_mask` returns to a model whose layers have an index."""

    mask: Tensor | SequenceShard | None
    """What it returns to other models."""

    dtype = None

    def __getitem__(self, _) -> IndexMask:
        """Models take its first head."""
        return self


class Index(NamedTuple):
    """What an indexer computes of its tokens."""

    q: Tensor
    """fp32 [b, s, h, d]."""
    weights: Tensor
    """fp32 [b, s, h]."""
    scale: float
    topk: int


class Scoring:
    """The index keys in the formulas of an indexer, step by step.

    Args:
        name: of the indexer. select: what returns the selected keys of an `Index`, in place of the indexer's result.
    """

    shape = (sys.maxsize,)  # keys: no fewer than topk

    def __init__(self, name: str, select: Callable[[Index], Tensor]):
        self._name, self._select = name, select
        self._q = self._weights = None
        self._scale, self._steps = 1.0, []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        scoring = next(x for x in args if isinstance(x, cls))
        if function is torch.matmul and args[1] is scoring:
            return scoring._multiply(args[0])
        if function in (F.relu, torch.relu):
            return scoring._after("relu", "products")
        raise scoring._unknown(getattr(function, "__name__", repr(function)))

    def _multiply(self, left: Tensor) -> Scoring:
        if self._steps:
            self._weights = left.squeeze(-2)
            return self._after("scores", "products", "relu")
        self._q = left
        return self._after("products")

    def _after(self, step: str, *before: str) -> Scoring:
        if self._steps != list(before):
            raise self._unknown(step)
        self._steps.append(step)
        return self

    def _unknown(self, step: str) -> ValueError:
        return ValueError(
            f"{self._name} scores keys in another way than sum of weight * relu(scale * q . k): {step} after "
            f"{', '.join(self._steps) or 'its keys'}. attn_implementation='tree' does not know it. {INSTEAD}"
        )

    def __mul__(self, scale: float) -> Scoring:
        if self._steps != ["products"]:
            raise self._unknown(f"times {scale}")
        self._scale *= scale
        return self

    def __add__(self, mask: IndexMask) -> Scoring:
        if not isinstance(mask, IndexMask):
            raise self._unknown("a sum")
        return self._after("mask", "products", "relu", "scores")

    def transpose(self, *_) -> Scoring:
        return self

    float = unsqueeze = squeeze = to = transpose

    def topk(self, topk: int, dim: int) -> TopK:
        self._after("topk", "products", "relu", "scores", "mask")
        return TopK(self._select(Index(self._q, self._weights, self._scale, topk)))


class TopK(NamedTuple):
    indices: Tensor


class IndexKeys:
    """What an indexer takes for the cache: it hands out a `Scoring`.

    Args: select: the selected keys, int32 [b, s, m], of an `Index` and the new index keys [b, s, d] of a layer.
    """

    def __init__(self, name: str, select: Callable[[Index, Tensor], Tensor]):
        self._name, self._select = name, select

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Scoring:
        return Scoring(self._name, lambda index: self._select(index, keys))


def index_on_ranks(config) -> None:
    """Let the indexers of this configuration's model select keys of all ranks where their mask is an `IndexMask`; done
    once.

    Raises: ValueError for a model that has no indexer.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type not in INDEXED:
        return
    model = model_class(config) or model_class(text)
    known = {} if model is None else vars(sys.modules[model.__module__])
    indexers = [x for name, x in known.items() if isinstance(x, type) and name.endswith("Indexer")]
    if not indexers:
        raise ValueError(f"{type(text).__name__} has index_topk={text.index_topk}, but its model no indexer. {INSTEAD}")
    for indexer in indexers:
        if not hasattr(indexer.forward, "selects_on_ranks"):
            indexer.forward = _selecting(indexer.forward)


def _selecting(forward: Callable) -> Callable:
    @outside_graphs
    @functools.wraps(forward)
    def select(module, *args, **kwargs):
        mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, IndexMask)), None)
        if mask is not None:
            name = f"{type(module).__name__} (layer_idx={module.layer_idx})"
            kwargs["past_key_values"] = IndexKeys(name, functools.partial(_select_of_shard, mask.mask))
        return forward(module, *args, **kwargs)

    select.selects_on_ranks = True
    return select


def _select_of_shard(shard: SequenceShard | Tensor | None, index: Index, keys: Tensor) -> Tensor:
    """The selected keys of a shard's queries; without a shard those of a whole sequence on this rank."""
    if isinstance(shard, Tensor):
        raise ValueError("attention_mask with padding in layers with an index needs a TreeCache")
    where = {"cp_group": None, "layout": "contiguous"}
    if shard is not None:
        where = {"cp_group": shard.cp_group, "layout": shard.documents or "zigzag", "config": shard.config}
    options = {"topk": index.topk, "softmax_scale": index.scale}
    return tree_select_func(index.q, index.weights, keys, **options, **where)
