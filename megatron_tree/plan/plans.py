"""The planner's data: sizes of a call, grids of ranks, and plans with their predicted cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """Heads of one rank (after tensor parallelism) and their sizes."""

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int


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
    """"grid" or "ring"."""
    grid: tuple[int, int]
    """(a, b): queries are gathered over a ranks, KV over b. A ring has (1, p)."""
    inner: tuple[int, int]
    """(a0, b0): the part of the grid inside one node; a0 * b0 = `Placement.block`."""
    head_groups: int
    """KV heads are processed in this many groups; one group's communication overlaps another's compute."""
    cost: Cost

    def __str__(self) -> str:
        if self.schedule == "ring":
            return "ring"
        inside = f" ({_by(self.inner)} inside a node)" if self.inner != (1, 1) else ""
        return f"grid {_by(self.grid)}{inside}" + (f" in {self.head_groups} head groups" * (self.head_groups > 1))


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How one attention call and its gradient are spread over the ranks."""

    forward: PassPlan
    backward: PassPlan
    reason: str
    """The choice and its alternatives, in one readable sentence."""
    candidates: tuple[tuple[PassPlan, ...], tuple[PassPlan, ...]]
    """All candidates for the forward and for the backward, fastest first."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One way to merge the partial states of a decode step over the ranks."""

    schedule: str
    across: str
    """How the leaders of "two_level" exchange: "direct" or "butterfly"."""
    cost: Cost

    def __str__(self) -> str:
        return f"two_level ({self.across} across)" if self.schedule == "two_level" else self.schedule


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """How one decode step reduces the partial states."""

    schedule: str
    across: str
    cost: Cost
    reason: str
    candidates: tuple[Reduction, ...]
    """All candidates, fastest first."""


def grids(world: int) -> list[tuple[int, int]]:
    """All grids (a, b) of `world` ranks, in ascending order of a."""
    return [(a, world // a) for a in range(1, world + 1) if world % a == 0]


def check_grid(grid: tuple[int, int], world: int, name: str = "grid") -> None:
    """Raise ``ValueError`` for a grid that does not have `world` cells."""
    if grid[0] * grid[1] != world:
        choices = ", ".join(_by(g) for g in grids(world))
        raise ValueError(
            f"{name}={grid} has {grid[0] * grid[1]} cells but cp_group has {world} ranks: choose {choices}"
        )


def inner_grids(grid: tuple[int, int], block: int) -> list[tuple[int, int]]:
    """All (a0, b0) of `block` cells that divide a grid of nodes of that size; there is always one."""
    return [(a, b) for a, b in grids(block) if grid[0] % a == 0 and grid[1] % b == 0]


def _by(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"
