"""Bytes that a rank sends between nodes: the ring, the grid alone, and heads across nodes with the grid inside.

Those of the planner's candidates, forward and backward of one layer with 1M tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..plan import Shape, TrainingPlan, load_topology
from .results import write_csv
from .simulated import training

SEQ_LEN = 1 << 20
CASES = (  # heads, KV heads, nodes, ranks of a node, u: as many nodes as exchange heads
    (32, 32, 8, 8, 8),
    (32, 32, 32, 8, 32),
    (32, 8, 8, 8, 8),
    (32, 8, 32, 8, 32),
    (64, 8, 32, 8, 32),
    (32, 32, 16, 1, 16),
    (16, 1, 8, 8, 8),
)


class Crossing(NamedTuple):
    """One shape on some nodes; bytes that a rank sends between nodes, the mean over the ranks."""

    num_heads: int
    num_heads_kv: int
    nodes: int
    ranks: int
    """Of a node."""
    u: int
    ring: float
    grid: float
    """The grids of forward and backward that send least."""
    heads_across: float
    """u ranks on different nodes exchange heads; the rest of a grid is inside the nodes where it fits there."""


def rows() -> list[Crossing]:
    """The table."""
    found = []
    for h, h_kv, nodes, ranks, u in CASES:
        shape, world = Shape(h, h_kv, 128, 128), nodes * ranks
        call = load_topology("dgx_h100"), world, shape, SEQ_LEN
        plans = {n: training(*call, ranks_per_node=ranks, ulysses_size=n) for n in (1, u)}
        sent = (_least(plans[1], "ring", (1, 1)), _least(plans[1], "grid", (1, 1)), _least(plans[u], "grid", (u, 1)))
        found.append(Crossing(h, h_kv, nodes, ranks, u, *sent))
    return found


def _least(plan: TrainingPlan, schedule: str, heads: tuple[int, int]) -> float:
    """Bytes over the network of the forward and the backward that send least, with heads exchanged like this."""
    allowed = [[c for c in t if (c.schedule, c.arrangement.heads) == (schedule, heads)] for t in plan.candidates]
    return sum(min(c.cost.bytes_per_level[1] for c in candidates) for candidates in allowed)


def table(found: list[Crossing]) -> str:
    """In Markdown, GB; the least of a line in bold."""
    lines = ["| heads / KV heads | nodes x ranks | ring | grid alone | heads across nodes, grid inside |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in found:
        sent = (row.ring, row.grid, row.heads_across)
        cells = [f"{n / 1e9:.3g} GB" if n > min(sent) else f"**{n / 1e9:.3g} GB**" for n in sent]
        names = f"{row.num_heads}/{row.num_heads_kv}", f"{row.nodes} x {row.ranks}"
        lines.append(f"| {' | '.join([*names, *cells])} (u = {row.u}) |")
    return "\n".join(lines)


def run(out: Path) -> None:
    """Print the table, and write it as bytes-between-nodes.csv into `out`."""
    found = rows()
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "bytes-between-nodes.csv", found)
    print("bytes that a rank sends between nodes, forward and backward of a layer, 1M tokens, bf16, head_dim 128\n")
    print(table(found))
