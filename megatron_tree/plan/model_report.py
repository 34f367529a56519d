"""Print what a whole model keeps, and what a decode step and a prompt take for every way to share its weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..units import format_bytes, format_seconds
from .model import ModelSizes, load_model_sizes
from .prompt import PromptCost, plan_prompt
from .recurrent import STATE_WORD
from .step import StepCost, plan_step
from .topology import Topology

STEP = {  # heading: field of StepCost
    "weights held": "held_bytes",
    "weights read": "weight_bytes",
    "cache read": "cache_bytes",
    "index keys read": "index_bytes",
    "states": "state_bytes",
    "sent for attention": "attention_bytes",
    "sent": "sent_bytes",
    "reading": "read_s",
    "time": "time_s",
}
PROMPT = {  # heading: field of PromptCost
    "weights and tokens sent": "moved_bytes",
    "sent for attention": "keys_bytes",
    "for states": "states_bytes",
    "weights": "weights_s",
    "attention": "attention_s",
    "index": "index_s",
    "recurrences": "recurrent_s",
    "sending": "moved_s",
    "time": "time_s",
}


def report(
    path: Path,
    topology: Topology,
    hosts: Sequence[int],
    batch: int,
    seq_len: int,
    bytes_per_word: int,
    *,
    as_json: bool = False,
) -> None:
    """Print the tables of a model's config.json, or one JSON object. Raises: ValueError; OSError."""
    model, sizes = load_model_sizes(path), dict(seq_len=seq_len, bytes_per_word=bytes_per_word)
    steps = plan_step(model, topology, hosts, batch=batch, **sizes)
    prompts = plan_prompt(model, topology, hosts, **sizes)
    if as_json:
        content = {"topology": topology.name, "ranks": len(hosts), "batch": batch, **sizes}
        content |= {"model": kept(model, bytes_per_word), "ways": [cost._asdict() for cost in steps]}
        content["prompt"] = [cost._asdict() | {"time_s": cost.time_s} for cost in prompts]
        print(json.dumps(content, indent=1))
        return
    print(f"{path}: {_sentence(model, bytes_per_word)}")
    machine = f"on {len(hosts)} ranks of {topology.name}"
    print(f"\na decode step {machine}; batch {batch}, {seq_len} tokens each; predicted")
    print_rows(_table(steps, STEP, "weights", head_groups=True))
    if model.recurrent and len(hosts) > model.recurrent.heads:
        heads = model.recurrent.heads
        print(
            f"   ranks beyond the {heads} heads of a recurrent layer have none: --weights sharded takes at most {heads}"
        )
    print(f"\na prompt of {seq_len} tokens {machine}; predicted")
    print_rows(_table(prompts, PROMPT, "prompt"))


def kept(model: ModelSizes, bytes_per_word: int) -> dict[str, Any]:
    """What a model is and keeps in the caches, in plain values."""
    recurrent, index = model.recurrent, model.index
    return {
        "layers": model.layers,
        "attention_layers": model.attention_layers,
        "recurrent_layers": recurrent.layers if recurrent else 0,
        "index_layers": index.layers if index else 0,
        "topk": index.topk if index else None,
        "parameters": round(model.parameters),
        "weight_bytes": round(model.parameters) * bytes_per_word,
        "recurrent_bytes_of_a_row": recurrent.layers * recurrent.state * STATE_WORD if recurrent else 0,
        "conv_bytes_of_a_row": recurrent.layers * recurrent.conv * bytes_per_word if recurrent else 0,
        "cache_bytes_of_a_token": model.token * bytes_per_word,
        "index_bytes_of_a_token": model.index_token * bytes_per_word,
    }


def _sentence(model: ModelSizes, bytes_per_word: int) -> str:
    have = kept(model, bytes_per_word)
    layers = [f"{have['attention_layers']} attend"]
    row, token = "", f"{format_bytes(have['cache_bytes_of_a_token'])} of keys and values"
    if have["recurrent_layers"]:
        layers.append(f"{have['recurrent_layers']} are recurrent")
        states = (format_bytes(have[f"{kind}_bytes_of_a_row"]) for kind in ("recurrent", "conv"))
        row = "a row keeps {} of recurrent states and {} of convolution states, ".format(*states)
    if have["topk"]:
        layers.append(f"{have['index_layers']} select {have['topk']} keys")
        token += f" and {format_bytes(have['index_bytes_of_a_token'])} of index keys"
    weights = (
        f"{have['parameters'] / 1e9:.4g} billion parameters without embedding, {format_bytes(have['weight_bytes'])}"
    )
    return f"{have['layers']} layers, of which {', '.join(layers)}; {weights}; {row}a token {token}"


def _table(
    costs: Sequence[StepCost | PromptCost], columns: dict[str, str], name: str, *, head_groups: bool = False
) -> list[list[str]]:
    """The fastest is marked; columns of zeros are left out."""
    columns = {heading: field for heading, field in columns.items() if any(getattr(cost, field) for cost in costs)}
    rows = [["", name, *["head groups"] * head_groups, *columns]]
    fastest = min(cost.time_s for cost in costs)
    for cost in costs:
        formats = (format_seconds if field.endswith("_s") else format_bytes for field in columns.values())
        cells = [to_text(getattr(cost, field)) for to_text, field in zip(formats, columns.values())]
        groups = [str(cost.head_groups)] if head_groups else []
        rows.append(["*" * (cost.time_s == fastest), cost.way, *groups, *cells])
    return rows


def print_rows(rows: list[list[str]]) -> None:
    """Columns: a mark and a name to the left, what begins with a digit and its heading to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    right = [any(cell[:1].isdigit() for cell in column) for column in zip(*rows)]
    print()
    for row in rows:
        cells = (cell.rjust(w) if to_right else cell.ljust(w) for cell, w, to_right in zip(row, widths, right))
        print("  ".join(cells).rstrip())
