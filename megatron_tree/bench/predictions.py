"""Plans of simulated clusters, and the tables of docs/planner.md: bytes between nodes, bytes of a prompt, and a decode
step with shared weights."""

from __future__ import annotations

import functools
import itertools
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..plan import (
    Placement,
    Shape,
    Topology,
    TrainingPlan,
    chunk_sizes,
    grids,
    load_topology,
    place,
    plan_prefill_grid,
    plan_training,
)
from ..plan.model import ModelSizes
from ..plan.plans import rival_names
from ..plan.step import WAYS, StepCost, plan_step
from .results import write_csv

BYTES_PER_WORD = 2  # bf16
SHAPES = {"MHA": Shape(32, 32, 128, 128), "GQA 4:1": Shape(32, 8, 128, 128), "GQA 8:1": Shape(64, 8, 128, 128)}
LONG = 1 << 20  # tokens
CROSSINGS = (  # heads, KV heads, nodes, ranks of a node, u: as many nodes as exchange heads
    (32, 32, 8, 8, 8),
    (32, 32, 32, 8, 32),
    (32, 8, 8, 8, 8),
    (32, 8, 32, 8, 32),
    (64, 8, 32, 8, 32),
    (32, 32, 16, 1, 16),
    (16, 1, 8, 8, 8),
)
PROMPTS = (  # what, ranks that share the tokens, heads, KV heads, tokens, tokens of a chunk
    ("70B, weights over 16", 2, 8, 1, 1 << 20, 1 << 15),
    ("70B, weights over 64", 8, 8, 1, 1 << 20, 1 << 15),
    ("8B, whole weights", 8, 32, 8, 1 << 17, 1 << 13),
    ("8B, whole weights", 8, 32, 8, 1 << 17, 1 << 11),
    ("8B, whole weights", 16, 32, 8, 1 << 20, 1 << 14),
    ("70B, whole weights", 64, 64, 8, 1 << 20, 1 << 15),
)
MODELS = {  # fields of the models' own config.json
    "Llama 3.1 70B": {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    },
    "DeepSeek V3": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "vocab_size": 129280,
    },
}


class Crossing(NamedTuple):
    """Mean bytes that a rank sends between nodes, forward and backward of one layer with `LONG` tokens."""

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


class Prompt(NamedTuple):
    """Bytes that a rank sends in one layer for a prompt in chunks over a sharded cache."""

    model: str
    ranks: int
    heads: int
    heads_kv: int
    tokens: int
    chunk: int
    ends: float
    """By p x 1 or 1 x p, whichever sends less, for each chunk."""
    least: float
    """By the grid that sends least."""
    chosen: float
    between_nodes: float
    """Part of `chosen`."""
    grids: str
    """The grids that the planner chooses for the chunks, in order."""


Step = namedtuple("Step", ("topology", "model", "batch", "ranks", *StepCost._fields))
"""One way to share the weights on one number of ranks, bf16; per rank."""


@functools.lru_cache
def placed(topology: Topology, ranks: int, ranks_per_node: int | None = None) -> Placement:
    """Ranks on nodes of ranks_per_node each; default: as many as the topology's hosts hold."""
    return place(topology, [n // (ranks_per_node or topology.host_size) for n in range(ranks)])


def training(
    topology: Topology,
    ranks: int,
    shape: Shape,
    seq_len: int,
    schedule: str = "auto",
    *,
    causal: bool = True,
    ranks_per_node: int | None = None,
    ulysses_size: int | None = None,
) -> TrainingPlan:
    """The plan of one attention in bf16; schedule: also "kv_gather" and "pure_tree"."""
    grid = {"kv_gather": (1, ranks), "pure_tree": (ranks, 1)}.get(schedule)
    return plan_training(
        ranks,
        shape,
        batch=1,
        seq_len=seq_len,
        bytes_per_word=BYTES_PER_WORD,
        causal=causal,
        topology=topology,
        placement=placed(topology, ranks, ranks_per_node),
        schedule="grid" if grid else schedule,
        grid=grid,
        ulysses_size=ulysses_size,
    )


def rival_seconds(plan: TrainingPlan, rival: str) -> float | None:
    """Seconds of forward and backward by the fastest schedule of this name; None where there is none.

    Both passes exchange heads over the same ranks.
    """
    least: list[dict] = [{}, {}]
    for by_heads, candidates in zip(least, plan.candidates):
        for candidate in candidates:  # the fastest first
            if rival in rival_names(candidate):
                by_heads.setdefault(candidate.arrangement.heads, candidate.cost.time_s)
    return min((least[0][heads] + least[1][heads] for heads in least[0].keys() & least[1].keys()), default=None)


def tokens_text(n: int) -> str:
    """1M, 32k."""
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k"


def crossings() -> list[Crossing]:
    """Bytes of the ring, of the grid alone, and of heads across nodes with the grid inside."""
    rows = []
    for h, h_kv, nodes, ranks, u in CROSSINGS:
        call = load_topology("dgx_h100"), nodes * ranks, Shape(h, h_kv, 128, 128), LONG
        plans = {n: training(*call, ranks_per_node=ranks, ulysses_size=n) for n in (1, u)}
        sent = []
        for n, schedule, heads in ((1, "ring", (1, 1)), (1, "grid", (1, 1)), (u, "grid", (u, 1))):
            allowed = [
                [c for c in candidates if (c.schedule, c.arrangement.heads) == (schedule, heads)]
                for candidates in plans[n].candidates
            ]
            sent.append(sum(min(c.cost.bytes_per_level[1] for c in candidates) for candidates in allowed))
        rows.append(Crossing(h, h_kv, nodes, ranks, u, *sent))
    return rows


def crossings_table(rows: list[Crossing]) -> str:
    """In Markdown; the least of a line in bold."""
    lines = []
    for row in rows:
        sent = (row.ring, row.grid, row.heads_across)
        *cells, last = _least_in_bold(sent, [f"{n / 1e9:.3g} GB" for n in sent])
        names = f"{row.num_heads}/{row.num_heads_kv}", f"{row.nodes} x {row.ranks}"
        lines.append((*names, *cells, f"{last} (u = {row.u})"))
    columns = ("heads / KV heads", "nodes x ranks", "ring", "grid alone", "heads across nodes, grid inside")
    return _markdown(columns, lines)


def prompts() -> list[Prompt]:
    """Bytes of p x 1 or 1 x p, of the best grids, and of those that the planner chooses."""
    return [Prompt(*case, *_sent(*case[1:])) for case in PROMPTS]


def _sent(ranks: int, heads: int, heads_kv: int, tokens: int, chunk: int) -> tuple[float, float, float, float, str]:
    topology, ends, least, chosen = load_topology("dgx_h100"), 0.0, 0.0, []
    shape = dict(num_heads=heads, head_dims=(128, 128), key_numbers=heads_kv * 256, bytes_per_word=BYTES_PER_WORD)
    for num_keys in range(chunk, tokens + 1, chunk):
        sizes = chunk_sizes(ranks, chunk, num_keys, **shape)
        x, y = sizes.q + sizes.o + sizes.statistic, sizes.kv
        of_grid = {grid: (grid[0] - 1) * x + (grid[1] - 1) * y for grid in grids(ranks)}
        ends += min(of_grid[1, ranks], of_grid[ranks, 1])
        least += min(of_grid.values())
        chosen.append(plan_prefill_grid((sizes,) * len(of_grid), topology=topology, placement=placed(topology, ranks)))
    names = dict.fromkeys(str(plan).removeprefix("grid ") for plan in chosen)
    sent, between = (sum(x) for x in zip(*((p.cost.bytes, p.cost.bytes_per_level[-1]) for p in chosen)))
    return ends, least, sent, between, ", ".join(names)


def prompts_table(rows: list[Prompt]) -> str:
    """In Markdown, GB."""
    columns = ("ranks that share the tokens", "heads / KV heads", "prompt, chunk")
    columns += ("better end", "best grid", "chosen", "between nodes")
    lines = []
    for row in rows:
        names = (f"{row.ranks} ({row.model})", f"{row.heads}/{row.heads_kv}")
        sent = (f"{x / 1e9:.3g}" for x in (row.ends, row.least, row.chosen, row.between_nodes))
        lines.append((*names, f"{tokens_text(row.tokens)}, {tokens_text(row.chunk)}", *sent))
    return _markdown(columns, lines)


def steps(topology: Topology) -> list[Step]:
    """A decode step of whole models over `LONG` cached tokens, for all ways to share the weights."""
    rows = []
    for (name, config), batch, ranks in itertools.product(MODELS.items(), (1, 64), (8, 16, 32, 64)):
        hosts = [rank // topology.host_size for rank in range(ranks)]
        for cost in plan_step(ModelSizes.of(config), topology, hosts, batch=batch, seq_len=LONG // batch):
            rows.append(Step(topology.name, name, batch, ranks, *cost))
    return rows


def steps_table(rows: list[Step]) -> str:
    """In Markdown: GB of weights that a rank reads, and ms of a step; the fastest of a line in bold."""
    at = {(p.model, p.batch, p.ranks, p.way): p for p in rows}
    lines = []
    for name in itertools.product(MODELS, (1, 64), (16, 32, 64)):
        line = [at[*name, way] for way in WAYS]
        cells = [f"{p.weight_bytes / 1e9:.3g} GB, {p.time_s * 1e3:.3g} ms" for p in line]
        lines.append((", ".join(map(str, name)), *_least_in_bold([p.time_s for p in line], cells)))
    return _markdown(("model, rows, ranks", *WAYS), lines)


def _markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *lines))


def _least_in_bold(values: Sequence[float], cells: Sequence[str]) -> list[str]:
    return [f"**{cell}**" if value == min(values) else cell for value, cell in zip(values, cells)]


def run(part: str, out: Path, topology: Topology | None) -> None:
    """Print one table ("bytes", "prompts" or "weights"), and write it as CSV into `out`."""
    topology = topology or load_topology("dgx_h100")
    name, rows, table, about = {
        "bytes": ("bytes-between-nodes", crossings, crossings_table, "bytes that a rank sends between nodes, forward "
            "and backward of a layer, 1M tokens, bf16, head_dim 128"),
        "prompts": ("bytes-of-prompts", prompts, prompts_table, "GB that a rank sends in a layer for a prompt over a "
            "cache, bf16, head_dim 128, DGX H100 nodes"),
        "weights": ("weights", lambda: steps(topology), steps_table, f"predicted on {topology.name}: GB of weights "
            "that a rank reads and ms of a step, 1M tokens of cache in all rows, bf16"),
    }[part]  # fmt: skip
    values = rows()
    write_csv(out / f"{name}.csv", values)
    print(f"{about}\n\n{table(values)}")
