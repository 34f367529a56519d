"""Where the ranks of a plan lie: u ranks exchange heads, an a x b grid joins those that then hold the same heads.

Every dimension has a part across nodes and a part inside a node. Position n * block + l is rank l of node n.
"""

from __future__ import annotations

from typing import NamedTuple

Pair = tuple[int, int]


class Coordinates(NamedTuple):
    """One position, each as (node, place inside the node)."""

    heads: Pair
    row: Pair
    column: Pair


class Arrangement(NamedTuple):
    """u x a x b ranks, nested by node."""

    heads: Pair
    """(across, inside): the factors of u."""
    grid: Pair
    """(a, b)."""
    inner: Pair
    """(a0, b0): the part of the grid inside a node."""
    block: int
    """Ranks of a node that the nesting knows; 1: not nested."""

    @property
    def u(self) -> int:
        """Ranks that exchange heads."""
        return self.heads[0] * self.heads[1]

    @property
    def outer(self) -> Pair:
        """The part of the grid across nodes."""
        return self.grid[0] // self.inner[0], self.grid[1] // self.inner[1]

    def coordinates(self, x: int) -> Coordinates:
        """Where a position lies. Neighbours exchange heads: their coordinate changes first."""
        (node, w1), (place, w0) = (divmod(n, u) for n, u in zip(divmod(x, self.block), self.heads))
        (i1, j1), (i0, j0) = divmod(node, self.outer[1]), divmod(place, self.inner[1])
        return Coordinates((w1, w0), (i1, i0), (j1, j0))

    def position(self, heads: Pair, row: Pair, column: Pair) -> int:
        """The inverse of `coordinates`."""
        (w1, w0), (i1, i0), (j1, j0), (u1, u0) = heads, row, column, self.heads
        node = (i1 * self.outer[1] + j1) * u1 + w1
        return node * self.block + (i0 * self.inner[1] + j0) * u0 + w0

    def key_team_of(self, x: int) -> tuple[range, ...]:
        """Positions that gather keys together with x: those of place i on all nodes, for every place i."""
        w, i, _ = self.coordinates(x)
        return self._line(self.position(w, i, (0, 0)), self.outer[1], self.inner[1], strides=(1, 1))

    def query_team_of(self, x: int) -> tuple[range, ...]:
        """Positions that gather queries together with x, in the same order."""
        w, _, j = self.coordinates(x)
        strides = self.outer[1], self.inner[1]
        return self._line(self.position(w, (0, 0), j), self.outer[0], self.inner[0], strides=strides)

    def _line(self, first: int, nodes: int, places: int, strides: Pair) -> tuple[range, ...]:
        """`places` ranges of positions, each with one on each of `nodes` nodes; strides: between cells of the grid."""
        far, near = strides[0] * self.heads[0] * self.block, strides[1] * self.heads[1]
        return tuple(range(start, start + nodes * far, far) for start in range(first, first + places * near, near))

    def holder_of(self, x: int) -> tuple[int, ...]:
        """Positions that exchange heads with x, itself among them, in the order of their heads."""
        _, i, j = self.coordinates(x)
        first, (across, inside) = self.position((0, 0), i, j), self.heads
        starts = range(first, first + across * self.block, self.block)
        return tuple(y for start in starts for y in range(start, start + inside))

    def places_of(self, x: int) -> tuple[int, ...]:
        """Positions with the same heads as x, in rising order: the ring's."""
        first, (across, inside) = self.position(self.coordinates(x).heads, (0, 0), (0, 0)), self.heads
        (a1, b1), (a0, b0) = self.outer, self.inner
        starts = range(first, first + a1 * b1 * across * self.block, across * self.block)
        return tuple(y for start in starts for y in range(start, start + a0 * b0 * inside, inside))


class HeadSplit(NamedTuple):
    """How u ranks share heads: in units of one KV head with some of its query heads, n units on each rank.

    The units are padded to u * n. With fewer KV heads than ranks, a KV head belongs to several units with different
    query heads; each rank is sent only the KV heads of its own units.
    """

    num_heads: int
    num_heads_kv: int
    u: int
    copies: int
    """Units to which a KV head belongs."""

    @classmethod
    def of(cls, num_heads: int, num_heads_kv: int, u: int, *, whole: bool = False) -> HeadSplit:
        """The split with the least padding, then with the fewest copies of KV heads. whole: without copies, so that all
        query heads of a KV head are on one rank."""
        queries = 1 if whole else num_heads // num_heads_kv
        splits = (cls(num_heads, num_heads_kv, u, r) for r in range(1, queries + 1) if queries % r == 0)
        return min(splits, key=lambda split: (split.padding, split.copies))

    @property
    def n(self) -> int:
        """Units of one rank, which are its KV heads."""
        return -(-self.num_heads_kv * self.copies // self.u)

    @property
    def queries(self) -> int:
        """Query heads of a unit."""
        return self.num_heads // (self.num_heads_kv * self.copies)

    @property
    def padding(self) -> float:
        """Query heads of all ranks with padding, per query head."""
        return self.u * self.n * self.queries / self.num_heads

    @property
    def kv_padding(self) -> float:
        """KV heads of all ranks with copies and padding, per KV head."""
        return self.u * self.n / self.num_heads_kv
