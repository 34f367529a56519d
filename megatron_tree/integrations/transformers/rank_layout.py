"""What one rank holds of a model whose weights are split over all ranks; pieces.py plans it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...cache.gathered import Piece, even_shares
from .head_groups import HeadGroups


@dataclass
class Layout:
    """The pieces of one rank of a model, and the modules whose results the ranks add up."""

    world: int
    rank: int
    heads: HeadGroups
    repeats_queries: bool = False
    """Every rank computes the queries of its head group."""
    pieces: dict[str, Piece] = field(default_factory=dict)
    """By the parameter's name; parameters without one are whole on every rank."""
    of_first_rank: set[str] = field(default_factory=set)
    """Biases that are added once: zeros on the other ranks."""
    whole: set[str] = field(default_factory=set)
    """Parameters that could be split and are not."""
    summed: list[str] = field(default_factory=list)
    """Modules that return a partial sum."""
    gathered: dict[str, int] = field(default_factory=dict)
    """Modules that return some of the last dimension's columns, and how many there are."""
    attentions: list[str] = field(default_factory=list)
    norms: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """RMS norms over more heads than a rank has: numbers of a whole row, and whether this rank's count."""
    tables: dict[str, int] = field(default_factory=dict)
    """Embeddings, of words and positions, and their rows."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Of this rank's part of every parameter."""
    whole_shapes: dict[str, torch.Size] = field(default_factory=dict)
    pieces_by_rank: list[dict[str, Piece]] = field(default_factory=list)
    """`pieces` of every rank."""
    query_projection: tuple[int, int] = (0, 0)
    """(numbers of the weights, columns of what they give) of a head group's queries, in the last layer; with latent
    attention queries for latents."""
    num_logits: int = 0
    """Rows of the whole LM head."""

    def piece_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        if name in self.pieces:
            return self.pieces[name].of(whole)
        return torch.zeros_like(whole) if name in self.of_first_rank and self.rank else whole

    @property
    def num_queries(self) -> int:
        """Heads whose queries this rank computes."""
        return sum(self.heads.shares) if self.repeats_queries else self.heads.shares[self.rank % self.heads.size]

    @property
    def latent_projections(self) -> list[tuple[int, int]]:
        """(numbers of the whole weight, columns of what it gives) of each module in `gathered`."""
        return [(self.whole_shapes[f"{name}.weight"].numel(), columns) for name, columns in self.gathered.items()]

    def share(self, n: int, unit: int = 1) -> tuple[int, int]:
        """(start, stop) of this rank's rows of n, in whole units, which divide n."""
        shares = even_shares(n // unit, self.world)
        first = sum(shares[: self.rank])
        return first * unit, (first + shares[self.rank]) * unit
