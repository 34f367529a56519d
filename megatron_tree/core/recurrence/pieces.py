"""A shard's rows by segment, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..layout import Segment
from .exchange import nothing

OfRows = Callable[[Tensor], Tensor]
"""x [b, s_local, ...] -> [n * b, t, ...]: the rows of n segments of one length, as batches."""


def each(
    segments: Sequence[Segment], numbers: Sequence[int], run: Callable[[OfRows, list[int]], tuple[Tensor, ...]]
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(number, tensors [b, ...] that run(of_rows, numbers) gives) of some segments; those of one length run as one
    batch."""
    by_length: dict[int, list[int]] = {}
    for i in numbers:
        by_length.setdefault(segments[i].length, []).append(i)
    for length, together in by_length.items():
        rows = [slice(segments[i].row, segments[i].row + length) for i in together]
        results = run(functools.partial(_of_rows, rows=rows), together)
        yield from zip(together, zip(*(x.chunk(len(together)) for x in results)))


def _of_rows(x: Tensor, rows: Sequence[slice]) -> Tensor:
    return x[:, rows[0]] if len(rows) == 1 else torch.cat([x[:, part] for part in rows])


def joined(segments: Sequence[Segment], outs: dict[int, Tensor], like: Tensor, *others: Tensor) -> Tensor:
    """The rows of all segments, outs[i] [b, t, ...], as [b, s_local, ...]; 0 in padding.

    like: a tensor with the shape and dtype of the result. others: what the result depends on besides (`nothing`).
    """
    rows, end = [], 0
    for i, segment in enumerate(segments):
        rows += [like.new_zeros(len(like), segment.row - end, *like.shape[2:]), outs[i].to(like.dtype)]
        end = segment.row + segment.length
    rows.append(like.new_zeros(len(like), like.shape[1] - end, *like.shape[2:]))
    return torch.cat([*rows, nothing(like, (len(like), 0, *like.shape[2:]), *others)], 1)
