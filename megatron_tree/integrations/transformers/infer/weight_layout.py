"""What one rank holds of a model whose weights are split over all ranks; split_rules.py plans it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ....cache.gathered import Piece, even_shares
from .recurrent_heads import HeadShare


class HeadGroups(NamedTuple):
    """How N ranks share query heads and KV heads; head groups are neighbouring ranks."""

    num_groups: int
    shares: tuple[int, ...]
    """Query heads of each rank of a head group."""
    num_heads_kv: int
    """Of a head group."""

    @classmethod
    def of(cls, world: int, num_heads: int, num_heads_kv: int) -> HeadGroups:
        """Raises: ValueError for more ranks than query heads."""
        if world > num_heads:
            raise ValueError(
                f"weights='sharded' on {world} ranks: each takes at least one of the model's {num_heads} query heads; "
                f"start {num_heads} ranks or fewer, or use weights='replicated'"
            )
        groups = math.gcd(world, num_heads_kv)
        return cls(groups, even_shares(num_heads // groups, world // groups), num_heads_kv // groups)

    @property
    def size(self) -> int:
        """Ranks of a head group."""
        return len(self.shares)

    def query_heads(self, rank: int) -> tuple[int, int]:
        """(first, last + 1) of a rank's query heads."""
        group, place = divmod(rank, self.size)
        first = group * sum(self.shares) + sum(self.shares[:place])
        return first, first + self.shares[place]

    def all_query_heads(self, rank: int) -> tuple[int, int]:
        """(first, last + 1) of the query heads of a rank's group."""
        first = rank // self.size * sum(self.shares)
        return first, first + sum(self.shares)

    def kv_heads(self, rank: int) -> tuple[int, int]:
        """(first, last + 1) of the KV heads of a rank's group."""
        first = rank // self.size * self.num_heads_kv
        return first, first + self.num_heads_kv


@dataclass
class WeightLayout:
    """One rank's pieces of a model's weights, and the modules whose results the ranks join."""

    world: int
    rank: int
    heads: HeadGroups
    repeats_queries: bool = False
    """Whether every rank computes all queries of its head group."""
    pieces: dict[str, Piece] = field(default_factory=dict)
    """By parameter name; parameters without a piece are whole on every rank."""
    of_first_rank: set[str] = field(default_factory=set)
    """Biases of partial sums: zeros on all ranks but the first."""
    whole: set[str] = field(default_factory=set)
    """Parameters that could be split and are not."""
    summed: list[str] = field(default_factory=list)
    """Modules that return a partial sum."""
    gathered: dict[str, int] = field(default_factory=dict)
    """Modules that return some columns of their output, and how many columns there are."""
    latents: list[str] = field(default_factory=list)
    """Those of them that project to latents."""
    attentions: list[str] = field(default_factory=list)
    """Attention modules."""
    recurrent: dict[str, HeadShare] = field(default_factory=dict)
    """Recurrent layers, and this rank's heads of them."""
    gates_queries: bool = False
    """Whether q projections also make a gate for the result of each head, so that queries can't be repeated."""
    norms: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """RMS norms over heads of several ranks: their width, and whether this rank's part enters the sum."""
    tables: dict[str, int] = field(default_factory=dict)
    """Embeddings, of words and positions, and their numbers of rows."""
    whole_shapes: dict[str, torch.Size] = field(default_factory=dict)
    """The whole shape of every parameter."""
    pieces_by_rank: list[dict[str, Piece]] = field(default_factory=list)
    """`pieces` of every rank."""
    query_projection: tuple[int, int] = (0, 0)
    """(weights, output columns) of a head group's queries in the last layer; with latents, of queries for them."""
    num_logits: int = 0
    """Rows of the whole LM head."""

    @property
    def state_pieces(self) -> dict[str, Piece]:
        """This rank's part of every recurrent state, by its name in a `RowState`."""
        return {name: piece for share in self.recurrent.values() for name, piece in share.states.items()}

    def piece_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        if name in self.pieces:
            return self.pieces[name].of(whole)
        return torch.zeros_like(whole) if name in self.of_first_rank and self.rank else whole

    def share(self, n: int, unit: int = 1) -> tuple[int, int]:
        """(start, stop) of this rank's rows of n, in whole units, which divide n."""
        shares = even_shares(n // unit, self.world)
        first = sum(shares[: self.rank])
        return first * unit, (first + shares[self.rank]) * unit
