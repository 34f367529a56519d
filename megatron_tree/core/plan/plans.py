"""The planner's data: where the ranks of a plan lie, plans with their predicted cost, and sizes of a call.

u ranks exchange heads, an a x b grid joins those that then hold the same heads. Every dimension has a part across nodes
and a part inside a node. Position n * block + l is rank l of node n.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from .topology import Topology

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
        """Positions that gather keys together with x: place i of all nodes, for every place i."""
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


class Shape(NamedTuple):
    """Heads of one rank (after tensor parallelism) and their sizes."""

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int

    def over(self, ranks: int) -> Shape:
        """Heads of each of `ranks` ranks that share these; ranks beyond the KV heads have the same ones."""
        return self._replace(num_heads=max(1, self.num_heads // ranks), num_heads_kv=max(1, self.num_heads_kv // ranks))


def check_heads(heads: int, kv_heads: int, tp: int) -> None:
    """Raise ``ValueError`` if a command's --heads, --kv-heads and --tp don't divide one another."""
    if heads % kv_heads:
        raise ValueError(f"--kv-heads {kv_heads} must divide --heads {heads}")
    if heads % tp:
        raise ValueError(f"--tp {tp} must divide --heads {heads}")
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(f"--tp {tp} and --kv-heads {kv_heads}: one must divide the other")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Predicted cost of one pass."""

    time_s: float
    """Seconds from start to end, with the overlap of communication and compute."""
    compute_s: float
    """Seconds of one rank's attention, part of time_s."""
    bytes_per_level: tuple[float, ...]
    """Bytes that one rank sends over each level of the topology, innermost first; the mean over the ranks."""
    steps: int
    """Number of exchanges or collectives that run one after another."""
    peak_bytes: int
    """Bytes of the busiest rank's buffers: gathered, partial and received tensors, beyond inputs and outputs."""

    @property
    def bytes(self) -> float:
        """Bytes that one rank sends over all levels."""
        return sum(self.bytes_per_level)


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """One forward or one backward."""

    schedule: str
    """"grid", "cast", "ring", or of `TreeConfig(deterministic="ranks")` "gather" or, backward, "integers"."""
    arrangement: Arrangement
    """Who exchanges heads, and the grid of those that then hold the same heads. A ring of n ranks is a grid (1, n)."""
    head_chunks: int
    """KV heads are processed in this many chunks; one chunk's communication overlaps another's compute."""
    cost: Cost

    @property
    def grid(self) -> tuple[int, int]:
        """(a, b): queries are gathered over a ranks, KV over b."""
        return self.arrangement.grid

    @property
    def inner(self) -> tuple[int, int]:
        """(a0, b0): the part of the grid inside one node."""
        return self.arrangement.inner

    @functools.cached_property
    def ulysses_size(self) -> int:
        """Ranks that exchange heads."""
        return self.arrangement.u

    def __str__(self) -> str:
        rest = self.grid[0] * self.grid[1]
        parts = [f"heads over {self._exchanging}"] if self.ulysses_size > 1 else []
        if self.schedule == "ring":
            parts.append(f"ring of {rest}" if parts else "ring")
        elif self.schedule == "cast":
            parts.append(f"cast among {rest}")
        elif self.schedule == "gather" and (rest > 1 or not parts):
            parts.append(f"rows gathered among {rest}")
        elif self.schedule == "integers":
            parts.append(f"keys gathered among {rest}, their gradients added up as integers")
        elif rest > 1 or not parts:
            inside = f" ({_by(self.inner)} inside a node)" if self.inner != (1, 1) else ""
            parts.append(f"grid {_by(self.grid)}{inside}")
        return ", ".join(parts) + f" in {self.head_chunks} head chunks" * (self.head_chunks > 1)

    @property
    def _exchanging(self) -> str:
        across, inside = self.arrangement.heads
        if self.arrangement.block == 1:
            return f"{across} ranks"
        return " x ".join([f"{across} nodes"] * (across > 1) + [f"{inside} ranks of a node"] * (inside > 1))


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How one attention call and its gradient are spread over the ranks."""

    forward: PassPlan
    backward: PassPlan
    reason: str
    """Two lines for each pass: the choice; what it takes."""
    candidates: tuple[tuple[PassPlan, ...], tuple[PassPlan, ...]]
    """All candidates for the forward and for the backward, fastest first."""


@dataclass(frozen=True, kw_only=True)
class ReductionPlan:
    """One way to merge the partial states of a decode step over the ranks."""

    schedule: str
    across: str
    """How the leaders of "two_level" exchange: "direct" or "butterfly"."""
    cost: Cost

    def __str__(self) -> str:
        return f"two_level ({self.across} across)" if self.schedule == "two_level" else self.schedule


@dataclass(frozen=True, kw_only=True)
class DecodePlan(ReductionPlan):
    """How one decode step reduces the partial states."""

    reason: str
    candidates: tuple[ReductionPlan, ...]
    """All candidates, fastest first."""


RIVALS = ("ring", "KV gather", "pure tree", "Ulysses", "a2a+p2p", "all-reduce")
"""What others use, and the paper: schedules that plans are compared with by name."""


def rival_names(plan: PassPlan | ReductionPlan) -> list[str]:
    """The names in `RIVALS` of a candidate. "a2a+p2p": heads exchanged inside a node, a ring across."""
    if isinstance(plan, ReductionPlan):
        name = {"allreduce": "all-reduce"}.get(plan.schedule, plan.schedule)
        return [name] if name in RIVALS else []
    (across, inside), (a, b) = plan.arrangement.heads, plan.grid
    if plan.schedule == "ring":
        return ["ring"] if across * inside == 1 else ["a2a+p2p"] if across == 1 and b > 1 else []
    if plan.schedule in ("cast", "gather", "integers"):
        return []
    if across * inside > 1:
        return ["Ulysses"] if a * b == 1 else []
    return ["KV gather"] * (a == 1) + ["pure tree"] * (b == 1)


def grids(world: int) -> list[tuple[int, int]]:
    """All grids (a, b) of `world` ranks, in ascending order of a."""
    return [(a, world // a) for a in range(1, world + 1) if world % a == 0]


def check_grid(grid: tuple[int, int], cells: int, name: str = "grid", ulysses_size: int = 1) -> None:
    """Raise ``ValueError`` for a grid that does not have `cells` cells."""
    if grid[0] * grid[1] != cells:
        choices = ", ".join(_by(g) for g in grids(cells))
        exchange = f" after exchanging heads over ulysses_size={ulysses_size}" if ulysses_size > 1 else ""
        raise ValueError(
            f"{name}={grid} has {grid[0] * grid[1]} cells but cp_group has {cells} ranks{exchange}: choose {choices}"
        )


def head_splits(size: int, nodes: int, block: int) -> list[tuple[int, int]]:
    """All ways (across, inside) to place `size` ranks that exchange heads on `nodes` nodes of `block` ranks."""
    return [(size // n, n) for n in range(1, size + 1) if size % n == 0 and block % n == 0 and nodes % (size // n) == 0]


def inner_grids(grid: tuple[int, int], block: int) -> list[tuple[int, int]]:
    """All (a0, b0) of `block` cells that divide a grid of nodes of that size; there is always one."""
    return [(a, b) for a, b in grids(block) if grid[0] % a == 0 and grid[1] % b == 0]


def _by(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"


STATISTIC = 4  # bytes of lse or delta of one query and head
DUAL_PRODUCTS = 3  # of x y: itself, and the two terms of its tangent
ROWS = (1, 10)  # how often a GPU's kernel moves its queries and results: forward, backward; fitted to published.yaml
MERGE = 6  # how often a merge on a GPU moves the fp32 result of a call; fitted likewise
MERGE_PACKED = 11  # the same in a ring over packed documents, half of each of which has a result; fitted likewise


class CallSizes(NamedTuple):
    """Bytes of one rank's shard in an attention call, with tangents if it is of dual tensors, and its compute."""

    q: float
    o: float
    statistic: float
    """Of lse or delta, without tangents."""
    kv: float
    flops: float
    """Floating-point operations of one rank's forward."""
    widening: float
    """Bytes of the kernels' fp32 results per byte of what travels."""
    mu: float = 0.0
    """Of the tangent of lse, a column of dual states; 0 without tangents."""
    with_lse: bool = False
    """Whether an exchange of heads returns lse with out."""
    packed: bool = False
    """Whether there are documents, each of which is cut over all ranks."""

    @classmethod
    def of(
        cls,
        world: int,
        shape: Shape,
        *,
        batch: int,
        seq_len: int,
        bytes_per_word: int,
        causal: bool,
        seq_len_kv: int | None = None,
        visible_fraction: float = 1.0,
        packed: bool = False,
        with_lse: bool = False,
        dual: bool = False,
    ) -> CallSizes:
        h, h_kv, d, d_v = shape
        seq_len_kv = seq_len if seq_len_kv is None else seq_len_kv
        tokens, tokens_kv = (batch * -(-s // world) for s in (seq_len, seq_len_kv))
        pairs = visible_fraction * tokens * seq_len_kv * h / (2 if causal else 1)
        numbers = 2 if dual else 1
        return cls(
            q=tokens * h * d * bytes_per_word * numbers,
            o=tokens * h * d_v * bytes_per_word * numbers,
            statistic=tokens * h * max(STATISTIC, bytes_per_word),
            kv=tokens_kv * h_kv * (d + d_v) * bytes_per_word * numbers,
            flops=2 * pairs * (d + d_v) * (DUAL_PRODUCTS if dual else 1),
            widening=max(1.0, 4 / bytes_per_word),
            mu=tokens * h * bytes_per_word if dual else 0.0,
            with_lse=with_lse,
            packed=packed,
        )

    def split(self, split: HeadSplit) -> CallSizes:
        """The sizes after an exchange of heads, which adds padding and copies of KV heads."""
        return self._replace(
            q=self.q * split.padding,
            o=self.o * split.padding,
            statistic=self.statistic * split.padding,
            mu=self.mu * split.padding,
            kv=self.kv * split.kv_padding,
            flops=self.flops * split.padding,
        )

    @property
    def out(self) -> float:
        """Of a state without lse: of the kernels' results."""
        return self.o + self.mu

    @property
    def _backward_statistics(self) -> float:
        """Of lse and delta, or of lse, mu, delta and kappa."""
        return self.statistic * (4 if self.mu else 2)

    def exchanged(self, backward: bool) -> tuple[float, float]:
        """Bytes of a shard that are exchanged before and after attention; each of u ranks sends (u - 1) / u of them."""
        if backward:
            return self.o + self._backward_statistics / 2, self.q + self.kv  # delta alone: lse is there
        return self.q + self.kv, self.out + self.statistic * self.with_lse

    def in_query_team(self, backward: bool) -> tuple[float, float]:
        """(gathered, reduced) bytes of a shard that a query team exchanges."""
        if backward:
            return self.q + self.o + self._backward_statistics, self.q
        return self.q, self.out + self.statistic

    def in_key_team(self, backward: bool) -> tuple[float, float]:
        """(gathered, reduced) bytes of a shard that a key team exchanges."""
        return self.kv, self.kv if backward else 0

    def seconds(self, topology: Topology, backward: bool) -> float:
        """Seconds of a rank's attention: two matrix products forward, five backward, or of dual tensors six and 15."""
        return self.flops * (2.5 if backward else 1) / topology.flops

    def beside_products(
        self, topology: Topology, backward: bool, *, calls: float, merged: float, merged_keys: float, merge: int = MERGE
    ) -> float:
        """Seconds in which a GPU's attention runs through memory beside its matrix products.

        calls: of kernels, each with the queries of one shard. merged, merged_keys: how many partial results of a
        shard's queries, and gradients of a shard's keys, are added to others. merge: how often that moves them.
        """
        queries = self.q if backward else self.out
        results = merged * queries + merged_keys * self.kv * backward
        moved = calls * ROWS[backward] * (self.q + self.o) + merge * self.widening * results
        return moved / topology.memory_bandwidth
