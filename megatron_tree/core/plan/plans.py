"""The planner's data: sizes of a call, grids of ranks, and plans with their predicted cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .arrangement import Arrangement


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
    """"grid", "cast", "ring" or "gather" (of `TreeConfig(deterministic="ranks")`)."""
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

    @property
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
    if plan.schedule in ("cast", "gather"):
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
