"""Whole parameters, put together from the pieces that ranks hold of them.

A rank contributes the rows of its piece. Ranks that hold the same piece, as those of a head group hold the same keys'
and values' projections, contribute an equal part of it each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Piece(NamedTuple):
    """Some rows of one dimension of a parameter, as runs (start, stop), in order."""

    dim: int
    runs: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """The piece of a parameter, in memory of its own."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.runs], self.dim)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Copy the piece into a parameter."""
        for rows, (start, stop) in zip(part.split([b - a for a, b in self.runs], self.dim), self.runs, strict=True):
            whole.narrow(self.dim, start, stop - start).copy_(rows)

    def shape(self, whole: torch.Size) -> torch.Size:
        rows = sum(stop - start for start, stop in self.runs)
        return torch.Size((*whole[: self.dim], rows, *whole[self.dim + 1 :]))


class Parts(NamedTuple):
    """What the ranks contribute of one parameter."""

    name: str
    shape: torch.Size
    """Of the whole parameter."""
    first: tuple[int, ...]
    """By rank: number of its first row in the piece that it holds, ..."""
    pieces: tuple[Piece, ...]
    """... and its rows in the whole."""

    def shape_of(self, rank: int) -> torch.Size:
        return self.pieces[rank].shape(self.shape)

    @classmethod
    def of(cls, name: str, shape: torch.Size, held: Sequence[Piece]) -> Parts:
        """Of a parameter of this shape; held: the pieces, by rank."""
        first, pieces = [], []
        for r, piece in enumerate(held):
            same = [other for other, its in enumerate(held) if its == piece]
            rows = even_shares(piece.shape(shape)[piece.dim], len(same))
            before = sum(rows[: same.index(r)])
            first.append(before)
            pieces.append(_rows(piece, before, before + rows[same.index(r)]))
        return cls(name, shape, tuple(first), tuple(pieces))

    @classmethod
    def from_first_rank(cls, name: str, shape: torch.Size, world: int) -> Parts:
        """Of a parameter that the first rank holds whole."""
        pieces = (Piece(0, ((0, shape[0]),)), *(Piece(0, ()) for _ in range(world - 1)))
        return cls(name, shape, (0,) * world, pieces)


def even_shares(n: int, world: int) -> tuple[int, ...]:
    """n rows over the ranks, the first ones get one more if it doesn't come out even."""
    return tuple(n // world + (r < n % world) for r in range(world))


def _rows(piece: Piece, start: int, stop: int) -> Piece:
    runs, at = [], 0
    for a, b in piece.runs:
        first, last = max(a, a + start - at), min(b, a + stop - at)
        if first < last:
            runs.append((first, last))
        at += b - a
    return Piece(piece.dim, tuple(runs))


def num_words(parts: Sequence[Parts], world: int) -> int:
    """Elements of the longest contribution to some parameters."""
    return max(sum(p.shape_of(rank).numel() for p in parts) for rank in range(world))


def own_part(model, parts: Sequence[Parts], world: int, rank: int) -> Tensor:
    """What this rank contributes, one after another, [1, elements of the longest contribution]."""
    local = []
    for p in parts:
        dim = p.pieces[rank].dim
        rows = model.get_parameter(p.name).data.narrow(dim, p.first[rank], p.shape_of(rank)[dim])
        local.append(rows.flatten())
    flat = torch.cat(local)
    return F.pad(flat, (0, num_words(parts, world) - len(flat)))[None]


def whole_parameters(model, parts: Sequence[Parts], arrived: Tensor) -> dict[str, Tensor]:
    """The whole parameters by name; arrived [ranks, elements]: what all ranks contribute."""
    whole = {p.name: model.get_parameter(p.name).data.new_empty(p.shape) for p in parts}
    for rank, flat in enumerate(arrived):
        sizes = [p.shape_of(rank).numel() for p in parts]
        for p, rows in zip(parts, flat[: sum(sizes)].split(sizes)):
            p.pieces[rank].put(rows.view(p.shape_of(rank)), whole[p.name])
    return whole
