"""Checks of masks that are given as slices."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..config import SLICES, AttnSlice, integers
from ..layout import Dispatched, Packed, Sharding


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
