"""Clusters of up to thousands of GPUs, simulated by the planner's cost model; nothing is measured.

paper: redraws the figures and tables of the Tree Attention paper with its published numbers, and extends them to 4,096
ranks and 10M tokens. pays: how much faster the planner's choice is than what others use, by ranks and tokens. bytes:
what a rank sends between nodes. prompts: what it sends for a prompt over a sharded cache. weights: a decode step of
whole models, with their weights shared in different ways.
All are those of the plans that `tree_attn_func` and `tree_decode` would follow.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..files import whole_file
from ..plan import Shape, Topology, known_topologies, load_topology, plan_decode
from . import paper, pays, predictions
from .predictions import BYTES_PER_WORD, SHAPES, placed, training
from .results import Curve, Panel, draw, grouped, write_csv

EXAMPLES = """\
examples:
  megatron-tree bench simulate                         all parts; files in bench-results/simulate
  megatron-tree bench simulate --out docs/images       as docs/paper.md and docs/planner.md show them
  megatron-tree bench simulate bytes                   the table of bytes between nodes
  megatron-tree bench simulate paper --topology gb200_nvl72
  megatron-tree bench simulate pays --topology mine.yaml
"""
PARTS = ("paper", "pays", "bytes", "prompts", "weights")
LONG = 10 << 20  # tokens of the largest sequence
RANKS = tuple(8 << i for i in range(10))
FEWEST_TO_TRAIN = 64  # fewer ranks can't hold the longest sequence's queries, keys and values
PAPERS = Shape(paper.HEADS, paper.HEADS, paper.HEAD_DIM, paper.HEAD_DIM)


class Point(NamedTuple):
    """One simulated point, and the paper's number if there is one."""

    part: str
    """"latency", "memory", "volume", "tables", "decode" or "training"."""
    topology: str
    ranks: int
    seq_len: int
    case: str
    schedule: str
    chosen: str
    """The plan: the grids, or the reduction."""
    time_s: float | None = None
    sent_bytes: float | None = None
    sent_outer_bytes: float | None = None
    memory_bytes: float | None = None
    published: float | None = None
    """Seconds (tables) or bytes (memory, volume) from the paper's tables and formulas."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, names = parser.add_argument, ", ".join(known_topologies())
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all of them)")
    add("--out", type=Path, default=Path("bench-results/simulate"), help="folder for the CSV and the plots")
    several = ", ".join(pays.RANKS)
    add("--topology", help=f"beyond the paper and of weights (default dgx_h100), and of pays ({several}): "
        f"{names}, or a .yaml file")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Simulate, print the tables, and write CSV and plots into args.out."""
    if unknown := [part for part in args.parts if part not in PARTS]:
        raise ValueError(f"{unknown[0]!r} is unknown: choose {', '.join(PARTS)}")
    topology = args.topology and load_topology(args.topology)
    args.out.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(args.parts or PARTS):
        print("\n" * (number > 0), end="")
        if part == "paper":
            _like_the_paper(args.out, topology or load_topology("dgx_h100"))
        elif part == "pays":
            pays.run(args.out, topology)
        else:
            predictions.run(part, args.out, topology)
    print(f"\nall files are in {args.out}")


def _like_the_paper(out: Path, topology: Topology) -> None:
    rows = [*latency(), *memory(), *volume(), *tables(), *scale(topology, RANKS)]
    write_csv(out / "simulate.csv", rows)
    of = grouped(rows, lambda row: row.part)
    figures = {
        "latency": ("one decode step, 16 heads, DGX H100 nodes (paper: figure 3)", _latency_panels(of["latency"])),
        "memory": (
            "memory of a decode step, two RTX 4090; circles: formulas",
            _memory_panels(of["memory"]),
        ),
        "scale": (f"{LONG >> 20}M tokens on {topology.name}, bf16", _scale_panels(of["decode"], of["training"])),
    }
    for name, (title, panels) in figures.items():
        with whole_file(out / f"simulate-{name}.png") as path:
            draw(path, [panels], f"Simulated: {title}")
    _print(rows)


def _decode(topology: Topology, ranks: int, shape: Shape, seq_len: int, schedule: str):
    """(plan, bytes of one rank's shard) of one new token, bf16."""
    shard = -(-seq_len // ranks) * shape.num_heads_kv * (shape.head_dim + shape.head_dim_v) * BYTES_PER_WORD
    sizes = dict(rows=shape.num_heads, head_dim_v=shape.head_dim_v, kv_bytes=shard)
    plan = plan_decode(ranks, **sizes, topology=topology, placement=placed(topology, ranks), schedule=schedule)
    return plan, shard


def _decode_points(
    part: str, topology: Topology, ranks: int, shape: Shape, seq_len: int, case: str, schedules=None, **words: float
) -> Iterator[Point]:
    """A decode step with each schedule; words: what the paper's formulas say for some of them."""
    for schedule in schedules or ("ring", "allreduce", "auto"):
        plan, shard = _decode(topology, ranks, shape, seq_len, schedule)
        cost, how = plan.cost, f"{plan.schedule} {plan.across}" if plan.schedule == "two_level" else plan.schedule
        costs = cost.time_s, cost.bytes, cost.bytes_per_level[-1], shard + cost.peak_bytes
        published = words[schedule] * BYTES_PER_WORD if schedule in words else None
        yield Point(part, topology.name, ranks, seq_len, case, schedule, how, *costs, published)


def latency() -> Iterator[Point]:
    """Figure 3: one decode step of 16 heads on 1 to 16 DGX H100 nodes; the paper's all-reduces and our own choice."""
    for nodes, seq_len in itertools.product(paper.NODES, paper.SEQ_LENS):
        yield from _decode_points("latency", load_topology("dgx_h100"), 8 * nodes, PAPERS, seq_len, f"{nodes} nodes")


def memory() -> Iterator[Point]:
    """Figure 4: shard and buffers of one decode step on each of two RTX 4090; published: equations 8 and 9."""
    topology, lengths = load_topology("rtx4090x2"), (32_000, 64_000, paper.MEMORY_SEQ_LEN, 256_000)
    for hidden, s in itertools.product(paper.MEMORY_GAP_MB, lengths):
        heads = hidden // paper.HEAD_DIM
        ring, tree = paper.ring_memory_words(1, s // 2, hidden), paper.tree_memory_words(1, s // 2, hidden, heads)
        shape = PAPERS._replace(num_heads=heads, num_heads_kv=heads)
        yield from _decode_points("memory", topology, 2, shape, s, f"hidden {hidden}", ring=ring, allreduce=tree)


def volume() -> Iterator[Point]:
    """Section 6.3: bytes that a rank sends in one decode step; published: equations 10 and 14 (all in bf16)."""
    topology, hidden, seq_len = load_topology("dgx_h100"), paper.HEADS * paper.HEAD_DIM, 640_000
    for ranks in (8, 64, 128):
        ring = paper.ring_words(1, seq_len // ranks, hidden, ranks)
        tree = paper.tree_words(1, hidden, paper.HEADS, ranks)
        yield from _decode_points("volume", topology, ranks, PAPERS, seq_len, "16 heads", ring=ring, allreduce=tree)


def tables() -> Iterator[Point]:
    """Tables 1 and 2: prompt and 10 new tokens of a whole model; published: their means in seconds.

    "tree" and "ring" follow the published code: KV heads repeated to query heads, the prompt computed by a ring over
    contiguous shares (the last rank computes a whole row of the mask), then all-reduces or the ring for every token.
    "auto" is ours: KV heads not repeated, zigzag shares, planned schedules. Linear layers count as 2 flops per
    parameter and token, and as one reading of all parameters per new token. Launches and Python are not counted.
    """
    for line in paper.TABLES:
        topology, model = load_topology(line.topology), paper.MODELS[line.model]
        repeated = Shape(model.num_heads, model.num_heads, model.head_dim, model.head_dim)
        linear = 2 * model.parameters * line.seq_len / line.ranks / topology.flops
        weights = model.parameters * BYTES_PER_WORD / topology.memory_bandwidth
        for name, shape, prompt, step, published in (
            ("tree", repeated, "ring", "allreduce", line.tree[0]),
            ("ring", repeated, "ring", "ring", line.ring[0]),
            ("auto", repeated._replace(num_heads_kv=model.num_heads_kv), "auto", "auto", None),
        ):
            prefill = training(topology, line.ranks, shape, line.seq_len, prompt, causal=name == "auto").forward
            plan, _ = _decode(topology, line.ranks, shape, line.seq_len, step)
            attention = model.layers * (prefill.cost.time_s + paper.NEW_TOKENS * plan.cost.time_s)
            total = attention + linear + paper.NEW_TOKENS * weights
            how = f"{prefill}, {plan.schedule}: a step's attention {model.layers * plan.cost.time_s * 1e3:.3g} ms"
            of = "tables", topology.name, line.ranks, line.seq_len, line.model, name, how, total
            yield Point(*of, published=published)


def scale(topology: Topology, num_ranks: Iterable[int]) -> Iterator[Point]:
    """10M tokens on ever more ranks: a decode step, and from 64 on forward and backward of one attention."""
    decode = ("ring", "allreduce", "allgather", "butterfly", "scatter", "two_level", "auto")
    for ranks in num_ranks:
        yield from _decode_points("decode", topology, ranks, SHAPES["GQA 4:1"], LONG, "GQA 4:1", decode)
        for case, shape in SHAPES.items() if ranks >= FEWEST_TO_TRAIN else ():
            for schedule in ("ring", "kv_gather", "pure_tree", "auto"):
                plan = training(topology, ranks, shape, LONG, schedule)
                both = plan.forward.cost, plan.backward.cost
                time_s, sent, outer = (sum(x) for x in zip(*((c.time_s, c.bytes, c.bytes_per_level[-1]) for c in both)))
                how = f"{plan.forward}; {plan.backward}"
                peak = max(c.peak_bytes for c in both)
                yield Point("training", topology.name, ranks, LONG, case, schedule, how, time_s, sent, outer, peak)


def _panel(
    rows: Iterable[Point],
    x: tuple[str, Callable[[Point], float]],
    y: tuple[str, Callable[[Point], float]],
    name: Callable[[Point], str] = lambda r: r.schedule,
    style: Callable[[Point], dict] = lambda r: {},
    **options,
) -> Panel:
    """A curve for each name; x, y: label, and row -> number."""
    curves = [
        Curve(text, [x[1](r) for r in of], [y[1](r) for r in of], style=style(of[0]))
        for text, of in grouped(rows, name).items()
    ]
    return Panel(x[0], y[0], curves, **options)


def _latency_panels(rows: list[Point]) -> list[Panel]:
    """Figure 3: relative to the ring at the shortest sequence, and in milliseconds at the longest."""
    base = {r.ranks: r.time_s for r in rows if r.schedule == "ring" and r.seq_len == paper.SEQ_LENS[0]}
    relative = f"time relative to the ring at {paper.SEQ_LENS[0] // 1000}k tokens", lambda r: r.time_s / base[r.ranks]
    name, style = lambda r: f"{r.schedule}, {r.ranks} GPUs", lambda r: dict(linewidth=0.6 + r.ranks / 60)
    longest = [r for r in rows if r.seq_len == paper.SEQ_LENS[-1]]
    step = f"ms per decode step at {paper.SEQ_LENS[-1] / 1e6:g}M tokens", lambda r: r.time_s * 1e3
    return [
        _panel(rows, ("tokens, millions", lambda r: r.seq_len / 1e6), relative, name, style),
        _panel(longest, ("GPUs", lambda r: r.ranks), step),
    ]


def _memory_panels(rows: list[Point]) -> list[Panel]:
    """Figure 4: what a rank holds; circles: the paper's formulas."""
    panels, x = [], ("tokens, thousands", lambda r: r.seq_len / 1e3)
    circles = dict(linestyle="none", marker="o", mfc="none", markersize=9)
    for case, of in grouped(rows, lambda r: r.case).items():
        held = _panel(of, x, (f"MB on a GPU, {case}", lambda r: r.memory_bytes / 1e6), yscale="linear")
        formulas = [r for r in of if r.published]
        name = lambda r: f"{r.schedule}, formula"  # noqa: E731
        held.curves.extend(_panel(formulas, x, ("", lambda r: r.published / 1e6), name, lambda r: circles).curves)
        panels.append(held)
    return panels


def _scale_panels(decode: list[Point], training: list[Point]) -> list[Panel]:
    """Decode and training at 10M tokens on ever more ranks."""
    ring = {(r.case, r.ranks): r.sent_bytes for r in training if r.schedule == "ring"}
    mha, auto = [r for r in training if r.case == "MHA"], [r for r in training if r.schedule == "auto"]
    share = "bytes of the planner's grid / the ring's", lambda r: r.sent_bytes / ring[r.case, r.ranks]
    ranks = "ranks", lambda r: r.ranks
    return [
        _panel(decode, ranks, ("ms per decode step, GQA 4:1", lambda r: r.time_s * 1e3)),
        _panel(mha, ranks, ("s of one attention, both passes, MHA", lambda r: r.time_s)),
        _panel(auto, ranks, share, lambda r: f"planner's, {r.case}", yscale="linear"),
    ]


def _print(rows: list[Point]) -> None:
    times = {(r.part, r.topology, r.ranks, r.seq_len, r.case, r.schedule): r.time_s for r in rows}
    print("simulated, not measured; published numbers from arXiv 2408.04093\n")
    print(f"{'tables 1 and 2, in seconds':28} {'tokens':>7}  {'published':^20}  {'simulated':^20}  ours")
    names = " ".join(f"{name:>6}" for name in ("tree", "ring", "ratio", " tree", "ring", "ratio", " auto"))
    print(f"{'':28} {'':>7}  {names}")
    for line in paper.TABLES:
        setup = "tables", line.topology, line.ranks, line.seq_len, line.model
        tree, ring, auto = (times[*setup, s] for s in ("tree", "ring", "auto"))
        numbers = [line.tree[0], line.ring[0], line.ring[0] / line.tree[0], tree, ring, ring / tree, auto]
        text = " ".join(f"{n:6.2f}" + " " * (i in (2, 5)) for i, n in enumerate(numbers))
        print(f"{line.model + ', ' + str(line.ranks) + ' x ' + line.topology:28} {line.seq_len:>7}  {text}")
    print("\nring / paper's tree / ours, one decode step of 16 heads at 5.12M tokens:")
    for nodes in paper.NODES:
        setup = "latency", "dgx_h100", 8 * nodes, paper.SEQ_LENS[-1], f"{nodes} nodes"
        ring, tree, auto = (times[*setup, s] * 1e3 for s in ("ring", "allreduce", "auto"))
        print(f"  {8 * nodes:>4} GPUs: {ring:8.2f} ms / {tree:.3f} ms / {auto:.3f} ms")
