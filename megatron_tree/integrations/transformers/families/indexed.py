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

from ....core.attention.selection import tree_select_func
from ....core.cache.attention import Index, Selection
from ..infer.model_runs import last_update
from ..train.batch_shards import SequenceShard
from .modeling import INSTEAD


class IndexMask(NamedTuple):
    """What `tree_mask` returns to a model whose layers have an index."""

    mask: Tensor | SequenceShard | None
    """What it returns to other models."""

    dtype = None

    def __getitem__(self, _) -> IndexMask:
        """Models take its first head."""
        return self


class Scoring:
    """The index keys in the formulas of an indexer, step by step.

    Args:
        name: of the indexer. select: what returns the selected keys of an `Index`, in place of the indexer's result.
    """

    shape = (sys.maxsize,)  # keys: no fewer than topk

    def __init__(self, name: str, select: Callable[[Index], Tensor | Selection]):
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
    """What the indexer makes its result of: the result."""

    selected: Tensor | Selection

    @property
    def indices(self) -> TopK:
        return self

    def to(self, _) -> Tensor | Selection:
        return self.selected


class IndexKeys(NamedTuple):
    """What an indexer takes for the cache: it hands out a `Scoring`."""

    name: str
    select: Callable[[Index, Tensor], Tensor | Selection]
    """Of an `Index` and the new index keys [b, s, d] of a layer."""

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Scoring:
        return Scoring(self.name, lambda index: self.select(index, keys))


def select(forward: Callable, module, *args, **kwargs):
    """`forward` of an indexer, which selects keys of all ranks where its mask is an `IndexMask`."""
    mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, IndexMask)), None)
    if mask is not None:
        name = f"{type(module).__name__} (layer_idx={module.layer_idx})"
        cached = kwargs.get("past_key_values") is not None
        found = functools.partial(_select_in_cache if cached else _select_of_shard, mask.mask)
        kwargs["past_key_values"] = IndexKeys(name, found)
    return forward(module, *args, **kwargs)


def _select_in_cache(visible: Tensor | SequenceShard | None, index: Index, keys: Tensor) -> Selection:
    """Of new tokens over a cache, whose layer's keys are stored."""
    update = last_update.get()
    if update is None or isinstance(visible, SequenceShard):
        raise ValueError("layers with an index need a TreeCache, or neither a cache nor use_cache=True")
    slot, config = update.cache.slot_of[update.layer_idx], update.cache.tree_config
    return update.forward.select(slot, keys, index, visible=visible, config=config)


def _select_of_shard(shard: SequenceShard | Tensor | None, index: Index, keys: Tensor) -> Tensor:
    """The selected keys of a shard's queries; without a shard those of a whole sequence on this rank."""
    if isinstance(shard, Tensor):
        raise ValueError("attention_mask with padding in layers with an index needs a TreeCache")
    where = {"cp_group": None, "layout": "contiguous"} if shard is None else shard.where
    return tree_select_func(index.q, index.weights, keys, **index.options, **where)
