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
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..files import whole_file
from ..plan import Shape, Topology, known_topologies, load_topology, plan_decode
from . import crossing, paper, pays, prompts, weights
from .figures import COLOURS, Curve, Panel, draw, grouped
from .results import write_csv
from .simulated import BYTES_PER_WORD, SHAPES, placed, training

EXAMPLES = """\
examples:
  megatron-tree bench simulate                         all parts; files in bench-results/simulate
  megatron-tree bench simulate --out docs/images       as docs/paper.md and docs/planner.md show them
  megatron-tree bench simulate bytes                   the table of bytes between nodes
  megatron-tree bench simulate paper --topology gb200_nvl72 --max-ranks 1152
  megatron-tree bench simulate pays --topology mine.yaml
"""
LONG = 10 << 20  # tokens of the largest sequence
FEWEST_TO_TRAIN = 64  # fewer ranks can't hold the longest sequence's queries, keys and values
DECODE = ("ring", "allreduce", "allgather", "butterfly", "scatter", "two_level", "auto")
TRAINING = ("ring", "KV gather", "pure tree", "auto")


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
    """The options of `bench simulate`."""
    add, names = parser.add_argument, ", ".join(known_topologies())
    add("parts", nargs="*", metavar="PART", help="paper, pays, bytes, prompts or weights (default: all of them)")
    add("--out", type=Path, default=Path("bench-results/simulate"), help="folder for the CSV and the plots")
    several = ", ".join(pays.RANKS)
    add("--topology", help=f"beyond the paper and of weights (default dgx_h100), and of pays ({several}): "
        f"{names}, or a .yaml file")  # fmt: skip
    add("--max-ranks", type=int, default=4096, help="beyond the paper (default 4096)")


def run(args: argparse.Namespace) -> None:
    """Simulate, print the tables, and write CSV and plots into args.out."""
    if unknown := [part for part in args.parts if part not in PARTS]:
        raise ValueError(f"{unknown[0]!r} is unknown: choose {', '.join(PARTS)}")
    if args.max_ranks < FEWEST_TO_TRAIN:
        raise ValueError(f"--max-ranks {args.max_ranks}: at least {FEWEST_TO_TRAIN} ranks hold the longest sequence")
    topology = args.topology and load_topology(args.topology)
    for number, part in enumerate(args.parts or PARTS):
        print("\n" * (number > 0), end="")
        PARTS[part](args.out, topology, args.max_ranks)
    print(f"\nall files are in {args.out}")


def _like_the_paper(out: Path, topology: Topology | None, max_ranks: int) -> None:
    topology = topology or load_topology("dgx_h100")
    rows = [*latency(), *memory(), *volume(), *tables(), *scale(topology, max_ranks)]
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "simulate.csv", rows)
    parts = grouped(rows, lambda row: row.part)
    figures = {
        "latency": (_latency_panels(parts["latency"]), "one decode step, 16 heads, DGX H100 nodes (paper: figure 3)"),
        "memory": (_memory_panels(parts["memory"]), "memory of a decode step, two RTX 4090 (paper: figure 4)"),
        "scale": (_scale_panels(parts["decode"], parts["training"]), f"{LONG >> 20}M tokens on {topology.name}, bf16"),
    }
    for name, (panels, title) in figures.items():
        with whole_file(out / f"simulate-{name}.png") as path:
            draw(path, [panels], f"Simulated: {title}")
    _print(rows)


PARTS = {
    "paper": _like_the_paper,
    "pays": lambda out, topology, _: pays.run(out, topology),
    "bytes": lambda out, topology, _: crossing.run(out),
    "prompts": lambda out, topology, _: prompts.run(out),
    "weights": lambda out, topology, _: weights.run(out, topology),
}


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


PAPERS = Shape(paper.HEADS, paper.HEADS, paper.HEAD_DIM, paper.HEAD_DIM)


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
        ring, tree = (
            paper.ring_words(1, seq_len // ranks, hidden, ranks),
            paper.tree_words(1, hidden, paper.HEADS, ranks),
        )
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


def scale(topology: Topology, max_ranks: int) -> Iterator[Point]:
    """10M tokens on ever more ranks: a decode step, and from 64 on forward and backward of one attention."""
    ranks = 8
    while ranks <= max_ranks:
        yield from _decode_points("decode", topology, ranks, SHAPES["GQA 4:1"], LONG, "GQA 4:1", DECODE)
        for case, shape in SHAPES.items() if ranks >= FEWEST_TO_TRAIN else ():
            for schedule in TRAINING:
                plan = training(topology, ranks, shape, LONG, schedule)
                both = plan.forward.cost, plan.backward.cost
                time_s, sent, outer = (sum(x) for x in zip(*((c.time_s, c.bytes, c.bytes_per_level[-1]) for c in both)))
                how = f"{plan.forward}; {plan.backward}"
                peak = max(c.peak_bytes for c in both)
                yield Point("training", topology.name, ranks, LONG, case, schedule, how, time_s, sent, outer, peak)
        ranks *= 2


LABELS = {"allreduce": "the paper's all-reduces", "auto": "the planner's choice"}


def _curve(rows: list[Point], x, y, name: str = "", **style) -> Curve:
    """One schedule's curve, in its colour; x, y: row -> number."""
    schedule = rows[0].schedule
    style = {"color": COLOURS[schedule.replace(" ", "_").replace("KV", "kv")], "marker": ".", **style}
    return Curve(name or schedule, [x(r) for r in rows], [y(r) for r in rows], style=style)


def _latency_panels(rows: list[Point]) -> list[Panel]:
    """Figure 3: relative to the ring at the shortest sequence, and in milliseconds at the longest."""
    base = {r.ranks: r.time_s for r in rows if r.schedule == "ring" and r.seq_len == paper.SEQ_LENS[0]}
    lines = grouped(rows, lambda r: (r.schedule, r.ranks))
    left = []
    for (schedule, gpus), of in lines.items():
        style = dict(name=f"{schedule}, {gpus} GPUs", linewidth=0.6 + gpus / 60)
        left.append(_curve(of, lambda r: r.seq_len / 1e6, lambda r: r.time_s / base[r.ranks], **style))
    longest = grouped((r for r in rows if r.seq_len == paper.SEQ_LENS[-1]), lambda r: r.schedule)
    right = [_curve(of, lambda r: r.ranks, lambda r: r.time_s * 1e3, LABELS.get(s, s)) for s, of in longest.items()]
    return [
        Panel("tokens, millions", f"time relative to the ring at {paper.SEQ_LENS[0] // 1000}k tokens", left),
        Panel("GPUs", f"ms per decode step at {paper.SEQ_LENS[-1] / 1e6:g}M tokens", right),
    ]


def _memory_panels(rows: list[Point]) -> list[Panel]:
    """Figure 4: what a rank holds, and the paper's formulas."""
    panels, hollow = [], dict(linestyle="none", marker="o", mfc="none", markersize=9)
    for case, mine in grouped(rows, lambda r: r.case).items():
        curves = []
        for name, of in grouped(mine, lambda r: r.schedule).items():
            curves.append(_curve(of, lambda r: r.seq_len / 1e3, lambda r: r.memory_bytes / 1e6, LABELS.get(name, name)))
            if of[0].published:
                formula = f"the paper's formula, {'ring' if name == 'ring' else 'tree'}"
                curves.append(_curve(of, lambda r: r.seq_len / 1e3, lambda r: r.published / 1e6, formula, **hollow))
        panels.append(Panel("tokens, thousands", f"MB on a GPU, {case}", curves, yscale="linear"))
    return panels


def _scale_panels(decode: list[Point], training: list[Point]) -> list[Panel]:
    """Decode and training at 10M tokens on ever more ranks."""
    ranks = operator.attrgetter("ranks")
    ring = {(r.case, r.ranks): r.sent_bytes for r in training if r.schedule == "ring"}
    steps = grouped(decode, lambda r: r.schedule).values()
    times = grouped((r for r in training if r.case == "MHA"), lambda r: r.schedule).values()
    sent = grouped((r for r in training if r.schedule == "auto"), lambda r: r.case).items()
    share = lambda r: r.sent_bytes / ring[r.case, r.ranks]  # noqa: E731
    ratios = [_curve(of, ranks, share, f"auto, {case}", color=None) for case, of in sent]
    return [
        Panel("ranks", "ms per decode step, GQA 4:1", [_curve(of, ranks, lambda r: r.time_s * 1e3) for of in steps]),
        Panel("ranks", "s of one attention, both passes, MHA", [_curve(of, ranks, lambda r: r.time_s) for of in times]),
        Panel("ranks", "bytes of the planner's grid / the ring's", ratios, yscale="linear"),
    ]


def _print(rows: list[Point]) -> None:
    found = {(r.part, r.topology, r.ranks, r.seq_len, r.case, r.schedule): r for r in rows}
    print("simulated, not measured; published numbers from arXiv 2408.04093\n")
    print(f"{'tables 1 and 2, in seconds':28} {'tokens':>7}  {'published':^20}  {'simulated':^20}  ours")
    names = " ".join(f"{name:>6}" for name in ("tree", "ring", "ratio", " tree", "ring", "ratio", " auto"))
    print(f"{'':28} {'':>7}  {names}")
    for line in paper.TABLES:
        tree, ring, auto = (
            found["tables", line.topology, line.ranks, line.seq_len, line.model, s].time_s
            for s in ("tree", "ring", "auto")
        )
        numbers = [line.tree[0], line.ring[0], line.ring[0] / line.tree[0], tree, ring, ring / tree, auto]
        text = " ".join(f"{n:6.2f}" + " " * (i in (2, 5)) for i, n in enumerate(numbers))
        print(f"{line.model + ', ' + str(line.ranks) + ' x ' + line.topology:28} {line.seq_len:>7}  {text}")
    print("\nring / paper's tree / ours, one decode step of 16 heads at 5.12M tokens:")
    for nodes in paper.NODES:
        ring, tree, auto = (
            found["latency", "dgx_h100", 8 * nodes, paper.SEQ_LENS[-1], f"{nodes} nodes", s].time_s * 1e3
            for s in ("ring", "allreduce", "auto")
        )
        print(f"  {8 * nodes:>4} GPUs: {ring:8.2f} ms / {tree:.3f} ms / {auto:.3f} ms")
