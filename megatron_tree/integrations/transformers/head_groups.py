"""How the ranks that share a model's weights share its heads."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...cache.gathered import even_shares


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
