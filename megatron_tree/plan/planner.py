"""Which schedule a call uses, as pure functions of sizes: no tensors, no communication.

The present rule counts the words a rank sends (docs/design.md, section 2); latency, bandwidth and levels of the
network are not in it yet.
"""

from __future__ import annotations

from typing import NamedTuple

ALLGATHER_LIMIT = 1 << 20  # bytes gathered per step above which splitting the rows over ranks pays


class Plan(NamedTuple):
    """How one training or prefill call is spread over the ranks; grids are (a, b), schedule "grid" or "ring"."""

    schedule: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    reason: str


class Shape(NamedTuple):
    """Sizes of one rank's share that decide the volume: heads after tensor parallelism."""

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int


def forward_words(grid: tuple[int, int], shape: Shape) -> int:
    """Words per token of a share that a rank sends forward: (a-1)(|Q| + |O| + lse) + (b-1)(|K| + |V|)."""
    a, b = grid
    h, h_kv, d, d_v = shape
    return (a - 1) * h * (d + d_v + 1) + (b - 1) * h_kv * (d + d_v)


def backward_words(grid: tuple[int, int], shape: Shape) -> int:
    """The same backward: down the column q, dout, lse, delta and then dq; along the row k, v and then dk, dv."""
    a, b = grid
    h, h_kv, d, d_v = shape
    return (a - 1) * h * (2 * d + d_v + 2) + (b - 1) * h_kv * 2 * (d + d_v)


def grids(world: int) -> list[tuple[int, int]]:
    """All grids (a, b) of `world` ranks, by rising a."""
    return [(a, world // a) for a in range(1, world + 1) if world % a == 0]


def check_grid(grid: tuple[int, int], world: int) -> None:
    """Raise ``ValueError`` for a grid that does not have `world` cells."""
    if grid[0] * grid[1] != world:
        choices = ", ".join(f"{a}x{b}" for a, b in grids(world))
        raise ValueError(f"grid={grid} has {grid[0] * grid[1]} cells but cp_group has {world} ranks: choose {choices}")


def plan_training(
    world: int, shape: Shape, *, schedule: str = "auto", grid: tuple[int, int] | None = None, bytes_per_word: int = 4
) -> Plan:
    """The plan for one attention call over `world` ranks; a pinned schedule or grid is taken as it is."""
    if schedule == "ring":
        return Plan("ring", (1, world), (1, world), "ring asked for")
    if grid is not None:
        check_grid(grid, world)
        return Plan("grid", grid, grid, f"grid {grid[0]}x{grid[1]} asked for")
    forward = min(grids(world), key=lambda g: forward_words(g, shape))
    backward = min(grids(world), key=lambda g: backward_words(g, shape))
    ring = (world - 1) * shape.num_heads_kv * (shape.head_dim + shape.head_dim_v)
    parts = [
        f"{name} on the {g[0]}x{g[1]} grid ({words(g, shape) * bytes_per_word} bytes per token and rank)"
        for name, g, words in (("forward", forward, forward_words), ("backward", backward, backward_words))
    ]
    return Plan(
        "grid",
        forward,
        backward,
        f"fewest bytes sent: {', '.join(parts)}; a ring's KV forward: {ring * bytes_per_word}",
    )


def plan_decode(world: int, state_bytes: int) -> tuple[str, str]:
    """(schedule, reason) of one decode reduction of a packed state of `state_bytes` per rank."""
    if world * state_bytes <= ALLGATHER_LIMIT:
        return "allgather", f"{world} x {state_bytes} bytes: one small collective, latency decides"
    return "scatter", f"{world} x {state_bytes} bytes: rows split over ranks, volume decides"
