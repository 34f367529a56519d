"""A decode step of a whole model over 1M cached tokens: ways to share the weights, predicted on 16 to 64 GPUs."""

from __future__ import annotations

import itertools
from collections import namedtuple
from pathlib import Path

from ..plan import Topology, load_topology
from ..plan.model import ModelSizes
from ..plan.step import WAYS, StepCost, plan_step
from .figures import Curve, Panel, draw
from .results import write_csv

TOKENS = 1 << 20  # of all rows
BATCHES = (1, 64)
RANKS = (8, 16, 32, 64)
SHOWN = (16, 32, 64)
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


Point = namedtuple("Point", ("topology", "model", "batch", "ranks", *StepCost._fields))
"""One way on one number of ranks, bf16; of a rank."""


def points(topology: Topology) -> list[Point]:
    """All models, batches, numbers of ranks and ways."""
    found = []
    for (name, config), batch, ranks in itertools.product(MODELS.items(), BATCHES, RANKS):
        hosts = [rank // topology.host_size for rank in range(ranks)]
        for cost in plan_step(ModelSizes.of(config), topology, hosts, batch=batch, seq_len=TOKENS // batch):
            found.append(Point(topology.name, name, batch, ranks, *cost))
    return found


def table(found: list[Point]) -> str:
    """In Markdown: GB of weights that a rank reads, and ms of a step; the fastest of a line in bold."""
    lines = ["| model, rows, ranks | " + " | ".join(WAYS) + " |", "| --- " * (len(WAYS) + 1) + "|"]
    at = {(p.model, p.batch, p.ranks, p.way): p for p in found}
    for name in itertools.product(MODELS, BATCHES, SHOWN):
        row = [at[*name, way] for way in WAYS]
        fastest = min(p.time_s for p in row)
        cells = (f"{p.weight_bytes / 1e9:.3g} GB, {p.time_s * 1e3:.3g} ms" for p in row)
        bold = (f"**{cell}**" if p.time_s == fastest else cell for p, cell in zip(row, cells))
        lines.append(f"| {', '.join(map(str, name))} | {' | '.join(bold)} |")
    return "\n".join(lines)


def run(out: Path, topology: Topology | None) -> None:
    """Print the table; write weights.csv and weights.png into `out`."""
    topology = topology or load_topology("dgx_h100")
    found = points(topology)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "weights.csv", found)
    panels = [
        [Panel("ranks", f"ms per token, {model}", _curves(found, model, "time_s", 1e3)),
         Panel("ranks", "GB of weights that a rank reads", _curves(found, model, "weight_bytes", 1e-9))]
        for model in MODELS
    ]  # fmt: skip
    draw(out / "weights.png", panels, f"Predicted on {topology.name}: one decode step over 1M tokens, one row, bf16")
    print(f"predicted on {topology.name}: GB of weights that a rank reads and ms of a step, {TOKENS >> 20}M tokens of "
          "cache in all rows, bf16\n")  # fmt: skip
    print(table(found))


def _curves(found: list[Point], model: str, field: str, unit: float) -> list[Curve]:
    curves = []
    for way in WAYS:
        of = [p for p in found if (p.model, p.batch, p.way) == (model, 1, way)]
        values = [getattr(p, field) * unit for p in of]
        curves.append(Curve(way, [p.ranks for p in of], values, style={"marker": "."}))
    return curves
