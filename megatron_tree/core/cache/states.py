"""What the recurrent layers of a model keep of a row.

It does not grow with the row, so all ranks have all of it; where they share the weights of recurrent layers, each has
the part of its heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .gathered import Piece


class RowState(NamedTuple):
    """The states of all recurrent layers after a row's first `length` tokens. Never changed: rows share it."""

    length: int
    tensors: dict[str, Tensor]
    """By a name of layer and state, [1, ...]."""

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())


def join_states(states: Sequence[RowState | None]) -> dict[str, Tensor]:
    """Copies of the states of several rows, [b, ...] by name; zeros for a row without. Empty if no row has any."""
    known = next((state.tensors for state in states if state is not None), {})
    rows = [None if state is None else state.tensors for state in states]
    return {
        name: torch.cat([torch.zeros_like(like) if row is None else row[name] for row in rows])
        for name, like in known.items()
    }


def split_states(tensors: dict[str, Tensor], lengths: Sequence[int]) -> list[RowState]:
    """The state of each row, of tensors [b, ...] by name, which must not be changed any more."""
    if len(lengths) == 1:
        return [RowState(lengths[0], dict(tensors))]
    return [RowState(n, {name: x[i : i + 1].clone() for name, x in tensors.items()}) for i, n in enumerate(lengths)]


def whole_state(parts: Sequence[tuple[Tensor, list[list[int]] | None]]) -> Tensor:
    """A state [1, n, ...] of which ranks have parts: (tensor, its runs [start, stop] of the n), or None: all of it."""
    first, runs = parts[0]
    if runs is None:
        return first
    whole = first.new_empty(1, max(stop for _, runs in parts for _, stop in runs), *first.shape[2:])
    for part, runs in parts:
        Piece(1, tuple(map(tuple, runs))).put(part, whole)
    return whole
