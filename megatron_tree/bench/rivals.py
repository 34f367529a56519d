"""Attention over several ranks that others wrote: contenders of `bench train` and `bench decode`.

They compute with their own kernels, so they need --compute real, and the planner has no prediction for them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from . import torch_ring


class Rival(NamedTuple):
    """A contender that others wrote."""

    contender: Callable
    """As the entries of `CONTENDERS` in train.py and decode.py."""
    missing: Callable[[], str | None]
    """Why it can't run here, or None."""


def _no_tree_attn_decode() -> str | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # of its annotations
            importlib.import_module("ring_attention_pytorch.tree_attn_decoding")
    except ImportError as error:
        return f"{error}: pip install ring-attention-pytorch"
    return None


def _tree_attn_decode(bench) -> tuple[Tensor]:
    """The paper's Algorithm 3 by lucidrains: torch's matrix products, then three all-reduces. It has no lse.

    KV heads are not repeated: broadcasting gives each to its query heads, and that is its fastest form.
    """
    module = importlib.import_module("ring_attention_pytorch.tree_attn_decoding")
    k, v = (x[:, :, None] for x in bench.by_head)  # [b, h_kv, 1, s, d]
    q = bench.q.transpose(1, 2).unflatten(1, (k.shape[1], -1))  # [b, h_kv, h / h_kv, 1, d]
    return (module.tree_attn_decode(q, k, v, shard_kv_seq=False).flatten(1, 2).transpose(1, 2),)


def _torch(rotation: str) -> Callable:
    return lambda bench, q, k, v: torch_ring.torch_ring(q, k, v, bench.group, rotation)


TRAIN = {
    "torch_ring": Rival(_torch("ALL_TO_ALL"), torch_ring.missing),
    "torch_gather": Rival(_torch("ALL_GATHER"), torch_ring.missing),
}
"""torch's context parallelism, with both ways to move keys and values."""
DECODE = {"tree_attn_decode": Rival(_tree_attn_decode, _no_tree_attn_decode)}
"""`ring_attention_pytorch.tree_attn_decode`, where that package is installed."""
