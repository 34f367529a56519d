"""The mathematics of a call, an `AttnSpec`, from the arguments of the public functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import AttnSpec, Dropout, integer, integers
from ..layout import ReadOnce


def make_spec(
    q: Tensor,
    causal: bool | None,
    softmax_scale: float | None,
    window_size,
    softcap: float,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool = False,
    *,
    ranges: bool = False,
    alibi_slopes: Tensor | None = None,
) -> AttnSpec:
    """The call's `AttnSpec` from checked arguments; softmax_scale defaults to 1 / sqrt(head_dim), causal to True.

    ranges: the mask is given as ranges, which leave nothing to causal and window_size. q has all query heads.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    if (
        isinstance(softmax_scale, bool)
        or not isinstance(softmax_scale, (int, float))
        or not math.isfinite(softmax_scale)
    ):
        raise ValueError(f"softmax_scale={softmax_scale!r} must be a finite number (or None for 1 / sqrt(head_dim))")
    if not isinstance(softcap, (int, float)) or not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap={softcap!r} must be a number >= 0; 0 turns it off")
    window = integers(window_size, -1)
    if window is None or len(window) != 2:
        raise ValueError(f"window_size={window_size!r} must be (left, right), each an integer >= 0 or -1 for unbounded")
    dropout = _dropout(dropout_p, dropout_seed)
    if ranges and (causal is not None or window != (-1, -1) or dropout):
        raise ValueError(
            f"ranges are the whole mask: leave causal={causal} and window_size={window} out"
            + (f"; and dropout_p={dropout_p} can't be combined with ranges: set it to 0" if dropout else "")
        )
    slopes = None if alibi_slopes is None else _slopes(alibi_slopes, q)
    if ranges and slopes is not None:
        raise ValueError("alibi_slopes can't be combined with ranges: leave one of the two out")
    return AttnSpec(
        softmax_scale=float(softmax_scale),
        causal=not ranges and (causal is None or bool(causal)),
        window_size=window,
        softcap=float(softcap),
        alibi_slopes=slopes,
        dropout=dropout,
        deterministic=deterministic,
    )


def _dropout(p: float, seed: int | None) -> Dropout | None:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ValueError(f"dropout_p={p!r} must be a probability, 0 <= dropout_p < 1; 0 turns it off")
    if p == 0:
        return None
    if (number := integer(seed)) is None or not 0 <= number < 1 << 63:
        raise ValueError(
            f"dropout_seed={seed!r} must be an integer from 0 to 2**63 - 1 when dropout_p={p}: draw a new one for "
            "every call, the same on all ranks of cp_group"
        )
    return Dropout(float(p), number)


def _slopes(slopes: Tensor, q: Tensor) -> tuple[tuple[float, ...], ...]:
    """alibi_slopes, fp32 [h] or [b, h], as in `AttnSpec`; a tensor is read once, which stalls an accelerator."""
    batch, heads = q.shape[0], q.shape[-2]
    ok = isinstance(slopes, Tensor) and slopes.dtype == torch.float32
    if not ok or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        seen = f"{slopes.dtype} {tuple(slopes.shape)}" if isinstance(slopes, Tensor) else type(slopes).__name__
        raise ValueError(
            f"alibi_slopes must be an fp32 tensor of one slope per query head, [{heads}], or for each row of the batch "
            f"as well, [{batch}, {heads}], got {seen}"
        )
    if slopes.requires_grad:
        raise ValueError("alibi_slopes get no gradient: pass alibi_slopes.detach(), or fixed slopes")
    return _read_slopes(slopes)


@ReadOnce
def _read_slopes(slopes: Tensor) -> tuple[tuple[float, ...], ...]:
    rows = tuple(map(tuple, slopes.reshape(-1, slopes.shape[-1]).tolist()))
    if not all(math.isfinite(slope) for row in rows for slope in row):
        raise ValueError(f"alibi_slopes={slopes.tolist()} must be finite numbers")
    return rows
