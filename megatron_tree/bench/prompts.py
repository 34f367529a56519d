"""Bytes that a rank sends in one layer for a prompt in chunks over a sharded cache: p x 1 or 1 x p, and grids."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..plan import PassPlan, chunk_sizes, grids, load_topology, plan_prefill_grid
from .results import write_csv
from .simulated import BYTES_PER_WORD, placed

CASES = (  # what, ranks that share the tokens, heads, KV heads, tokens, tokens of a chunk
    ("70B, weights over 16", 2, 8, 1, 1 << 20, 1 << 15),
    ("70B, weights over 64", 8, 8, 1, 1 << 20, 1 << 15),
    ("8B, whole weights", 8, 32, 8, 1 << 17, 1 << 13),
    ("8B, whole weights", 8, 32, 8, 1 << 17, 1 << 11),
    ("8B, whole weights", 16, 32, 8, 1 << 20, 1 << 14),
    ("70B, whole weights", 64, 64, 8, 1 << 20, 1 << 15),
)


class Prompt(NamedTuple):
    """One prompt; bytes that a rank sends in a layer, and those of them that it sends between nodes."""

    model: str
    ranks: int
    heads: int
    heads_kv: int
    tokens: int
    chunk: int
    ends: float
    """Of p x 1 or 1 x p, whichever sends less, for each chunk."""
    least: float
    """Of the grid that sends least."""
    chosen: float
    between_nodes: float
    """Of `chosen`."""
    grids: str
    """The grids that the planner chooses for the chunks, in order."""


def rows() -> list[Prompt]:
    """The table."""
    return [Prompt(*case, *_sent(*case[1:])) for case in CASES]


def _sent(ranks: int, heads: int, heads_kv: int, tokens: int, chunk: int) -> tuple[float, float, float, float, str]:
    topology, ends, least, chosen = load_topology("dgx_h100"), 0.0, 0.0, []
    for num_keys in range(chunk, tokens + 1, chunk):
        sizes = chunk_sizes(
            ranks,
            chunk,
            num_keys,
            num_heads=heads,
            head_dims=(128, 128),
            key_numbers=heads_kv * 256,
            bytes_per_word=BYTES_PER_WORD,
        )
        x, y = sizes.q + sizes.o + sizes.statistic, sizes.kv
        of_grid = {grid: (grid[0] - 1) * x + (grid[1] - 1) * y for grid in grids(ranks)}
        ends += min(of_grid[1, ranks], of_grid[ranks, 1])
        least += min(of_grid.values())
        chosen.append(plan_prefill_grid((sizes,) * len(of_grid), topology=topology, placement=placed(topology, ranks)))
    names = dict.fromkeys(map(_name, chosen))
    sent, between = (sum(x) for x in zip(*((p.cost.bytes, p.cost.bytes_per_level[-1]) for p in chosen)))
    return ends, least, sent, between, ", ".join(names)


def _name(plan: PassPlan) -> str:
    return str(plan).removeprefix("grid ")


def table(found: list[Prompt]) -> str:
    """In Markdown, GB."""
    columns = ("ranks that share the tokens", "heads / KV heads", "prompt, chunk")
    columns += ("better end", "best grid", "chosen", "between nodes")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in found:
        names = (
            f"{row.ranks} ({row.model})",
            f"{row.heads}/{row.heads_kv}",
            f"{_count(row.tokens)}, {_count(row.chunk)}",
        )
        sent = (f"{x / 1e9:.3g}" for x in (row.ends, row.least, row.chosen, row.between_nodes))
        lines.append(f"| {' | '.join([*names, *sent])} |")
    return "\n".join(lines)


def _count(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}k"


def run(out: Path) -> None:
    """Print the table, and write it as bytes-of-prompts.csv into `out`."""
    found = rows()
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "bytes-of-prompts.csv", found)
    print("GB that a rank sends in a layer for a prompt over a cache, bf16, head_dim 128, DGX H100 nodes\n")
    print(table(found))
    print()
    for row in found:
        print(f"{row.ranks:>4} ranks, {row.heads}/{row.heads_kv}, chunks of {_count(row.chunk)}: {row.grids}")
