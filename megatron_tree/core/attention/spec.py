"""From the arguments of the public functions: the mathematics of a call, an `AttnSpec`, its mask as slices, and the
dtype of its tensors under autocast."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import integer, integers
from ..layout import Dispatched, Packed, ReadOnce, Sharding
from ..spec import SLICES, AttnSlice, AttnSpec, Dropout

_NOTHING = contextlib.nullcontext()
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def make_spec(
    q: Tensor,
    causal: bool | None,
    softmax_scale: float | None,
    window_size,
    softcap: float,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool | str = False,
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


def make_slices(ranges: Sequence, queries: Sharding, keys: Sharding) -> tuple[AttnSlice, ...]:
    """Checked slices from (q_range, k_range) or (q_range, k_range, kind) each.

    Raises: ``ValueError`` for a slice that is not as in `AttnSlice`, ranges beyond the sequences, and slices that show
        a query the same key twice.
    """
    if isinstance(ranges, (str, bytes)) or not isinstance(ranges, Sequence):
        raise ValueError(f"ranges={ranges!r} must be a list of AttnSlice or (q_range, k_range, kind)")
    lengths = []
    for sharding in (queries, keys):
        documents = sharding.layout if isinstance(sharding.layout, (Packed, Dispatched)) else None
        if documents is not None and len(documents.lengths) != 1:
            raise ValueError(
                f"ranges are positions in one sequence, but layout={documents!r}: make them slices of one document"
            )
        lengths.append(sharding.seq_len if documents is None else documents.lengths[0])
    return _checked(tuple(_slice(i, given) for i, given in enumerate(ranges)), *lengths)


def _slice(i: int, given) -> AttnSlice:
    parts = tuple(given) if isinstance(given, (tuple, list)) else ()
    spans = [integers(span) for span in parts[:2]]
    pairs = len(parts) in (2, 3) and all(span is not None and len(span) == 2 for span in spans)
    if pairs and (parts[2:] or SLICES)[0] in SLICES:
        return AttnSlice(*spans, *parts[2:])
    raise ValueError(
        f"ranges[{i}]={given!r} must be ((q_first, q_end), (k_first, k_end), kind) with integers and a kind of "
        f"{', '.join(map(repr, SLICES))}"
    )


@functools.lru_cache(maxsize=64)
def _checked(slices: tuple[AttnSlice, ...], seq_len: int, seq_len_kv: int) -> tuple[AttnSlice, ...]:
    for i, piece in enumerate(slices):
        for name, span, end in (("q_range", piece.q_range, seq_len), ("k_range", piece.k_range, seq_len_kv)):
            if not 0 <= span[0] <= span[1] <= end:
                raise ValueError(f"ranges[{i}]: {name}={span} is not within a sequence of {end} tokens")
    open_ones: list[AttnSlice] = []
    for piece in sorted(piece for piece in slices if piece.pairs):
        open_ones = [other for other in open_ones if piece.q_range[0] < other.q_range[1]]
        twice = next((other for other in open_ones if _overlap(piece, other)), None)
        if twice is not None:
            raise ValueError(
                f"ranges: {tuple(twice)} and {tuple(piece)} show a query the same key, which would count twice: "
                "cut one of them"
            )
        open_ones.append(piece)
    return slices


def _overlap(a: AttnSlice, b: AttnSlice) -> bool:
    """Whether a (query, key) pair is in both: they share queries and keys, and a distance between the two."""
    (q_first, q_end), (k_first, k_end) = (
        (max(x[0], y[0]), min(x[1], y[1])) for x, y in zip((a.q_range, a.k_range), (b.q_range, b.k_range))
    )
    if q_first >= q_end or k_first >= k_end:
        return False
    least = max([k_first - q_end + 1, *(-piece.left for piece in (a, b) if piece.left is not None)])
    most = min([k_end - 1 - q_first, *(piece.right for piece in (a, b) if piece.right is not None)])
    return least <= most


def autocast(*tensors: Tensor | None) -> tuple:
    """A context without autocast, and the tensors in the dtype of the autocast that is enabled for the first one.

    float64 stays, as in torch, and so does what is no tensor of that device. Without autocast nothing changes.
    """
    first = tensors[0]
    device = first.device.type if isinstance(first, Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return _NOTHING, *tensors
    dtype = torch.get_autocast_dtype(device)
    cast = (isinstance(x, Tensor) and x.dtype in _CAST and x.device.type == device for x in tensors)
    tensors = (x.to(dtype) if casts else x for x, casts in zip(tensors, cast, strict=True))
    return torch.autocast(device, enabled=False), *tensors
