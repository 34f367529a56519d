"""Images whose tokens see each other in both directions (Gemma 3), in the causal text part of a model.

Beside what a causal mask shows, a token sees those that follow it in its image: `ImageMask` says which. A state of
these keys alone is made on every rank, which has all new tokens, and is merged into that of the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....attention.functional import tree_attn_func
from ....config import AttnSlice
from ....generation.images import runs_of
from ....merge import State, empty_state

WITH_BLOCKS = ("gemma3_text",)


class ImageMask(NamedTuple):
    """A mask of models with such images."""

    visible: Tensor | None
    """bool [b, slots], False for padding; None: there is none."""
    joined: Tensor
    """bool [b, n], of the new tokens: whether a token sees the next one, of the same image."""


def image_mask(
    visible: Tensor | None, mask_function, batch_size: int, num_tokens: int, offset: int, device
) -> ImageMask | Tensor | None:
    """The mask of num_tokens new tokens at slots `offset` and later, by Transformers' function of (row, head, query,
    key); only `visible` where no token sees a later one.

    Raises: ValueError for packed sequences.
    """
    slots = offset + torch.arange(num_tokens, device=device)[None]
    rows, head = torch.arange(batch_size, device=device)[:, None], torch.zeros(1, 1, dtype=torch.int64, device=device)
    if not mask_function(rows, head, slots[:, 1:], slots[:, :-1]).all():
        raise ValueError(
            "position_ids that start again (packed sequences) are not supported with attn_implementation='tree' but in "
            "training on shards; use 'sdpa'"
        )
    joined = F.pad(mask_function(rows, head, slots[:, :-1], slots[:, 1:]).expand(batch_size, -1), (0, 1))
    return ImageMask(visible, joined) if joined.any() else visible


def blocks_of(joined: Tensor) -> list[tuple[int, int]]:
    """(first token, one past the last) of every image with two tokens or more; joined: bool [n] of one row."""
    return [(first, last + 1) for first, last in runs_of(joined)]


def state_ahead(mask: ImageMask, q: Tensor, k: Tensor, v: Tensor, **options) -> State:
    """Attention of new tokens to those that follow them in their image: out [b, n, h, d_v], lse [b, h, n].

    q [b, n, h, d], k [b, n, h_kv, d], v [b, n, h_kv, d_v]: all new tokens. options: softmax_scale, softcap.
    """
    out, lse = empty_state((*q.shape[:3], v.shape[-1]), device=q.device)
    for row, joined in enumerate(mask.joined):
        slices = [AttnSlice((first, last - 1), (first + 1, last), "inverse") for first, last in blocks_of(joined)]
        if slices:
            own = (x[row : row + 1] for x in (q, k, v))
            more = {"ranges": slices, "layout": "contiguous", "return_lse": True}
            out[row : row + 1], lse[row : row + 1] = tree_attn_func(*own, cp_group=None, **more, **options)
    return out, lse
