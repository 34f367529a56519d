"""Print the plan of an attention call on a cluster and its rivals, with their predicted cost."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import NamedTuple

from ..config import DECODE_SCHEDULES, SCHEDULES, Visibility
from ..files import whole_file
from ..layout import Dispatched, Sharding, shard_lengths, spread_documents
from ..units import format_bytes, format_seconds, parse_bytes, parse_count, parse_grid
from .cast import Mask
from .model import load_model_sizes
from .planner import plan_decode, plan_training
from .plans import Cost, PassPlan, Reduction, Shape, check_heads, rival_names
from .step import plan_step
from .topology import Placement, Topology, known_topologies, load_topology, place

EXAMPLES = """\
examples:
  megatron-tree plan --topology dgx_h100 --nodes 16 --seq-len 1M --heads 32 --kv-heads 8 --head-dim 128
  megatron-tree plan --topology ethernet --nodes 4 --ranks-per-node 4 --pass decode --seq-len 128k
  megatron-tree plan --topology dgx_h100 --nodes 2 --pass decode --heads 64 --kv-heads 8 --own-heads
  megatron-tree plan --topology dgx_h100 --nodes 8 --pass backward --memory-budget 2GB --csv plan.csv
  megatron-tree plan --topology mine.yaml --nodes 2 --grid 4x4 --head-chunks 2
  megatron-tree plan --topology dgx_h100 --nodes 32 --seq-len 1M --ulysses-size 32 --all
  megatron-tree plan --topology dgx_h100 --nodes 8 --heads 64 --kv-heads 8 --head-dim 64 --window 127
  megatron-tree plan --topology dgx_h100 --nodes 8 --pass forward --documents 200x2k,1x128k
  megatron-tree plan --topology dgx_h100 --nodes 8 --tp 8 --heads 64 --kv-heads 8 --pass backward
  megatron-tree plan --topology dgx_h100 --nodes 8 --pass forward --json
  megatron-tree plan --topology dgx_h100 --nodes 4 --seq-len 1M --model my-model/config.json

k, M and G are 1024, 1024^2 and 1024^3 tokens; kB, MB, GB (10^3 ...) and KiB, MiB, GiB (2^10 ...) are bytes.
"""
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
PASSES = ("forward", "backward", "decode")


class Entry(NamedTuple):
    """One line of the table."""

    name: str
    candidate: PassPlan | Reduction
    chosen: bool
    fits: bool

    @property
    def cost(self) -> Cost:
        return self.candidate.cost


def main(argv: list[str]) -> int:
    """Print the tables; 0 if there is a plan."""
    args = _parser().parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-tree plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("the machine").add_argument
    add("--topology", required=True, help=f"{', '.join(known_topologies())}, or the path of a .yaml file")
    add("--nodes", type=parse_count, default=1, help="hosts (default 1)")
    add("--ranks-per-node", type=parse_count, help="ranks on each host (default: as many as the topology says)")
    add("--tp", type=parse_count, default=1, help="tensor-parallel ranks, which have neighbouring ranks and share the "
        "heads; the others share the sequence (default 1)")  # fmt: skip
    add = parser.add_argument_group("the call").add_argument
    add("--seq-len", type=parse_count, default=1 << 17, help="tokens of the whole sequence (default 128k)")
    add("--documents", type=_documents, help="COUNTxTOKENS,...: packed documents instead, dispatched over the ranks")
    add("--batch", type=parse_count, default=1, help="sequences (default 1)")
    add("--heads", type=parse_count, default=32, help="query heads (default 32)")
    add("--kv-heads", type=parse_count, help="KV heads (default: as many as query heads)")
    add("--head-dim", type=parse_count, default=128, help="of queries and keys (default 128)")
    add("--head-dim-v", type=parse_count, help="of values (default: --head-dim)")
    add("--dtype", choices=BYTES, default="bf16", help="of q, k, v and the messages (default bf16)")
    add("--full", action="store_true", help="no causal mask")
    add("--window", type=parse_count, help="keys that a query sees before itself (default: all)")
    add("--queries", type=parse_count, default=1, help="queries of a decode step (default 1)")
    add("--own-heads", action="store_true", help="the weights are split over the ranks, too: each needs the results of "
        "its own heads only (decode)")  # fmt: skip
    add("--model", type=Path, help="the config.json of a model: print what a decode step of the whole model reads, "
        "sends and takes for every way to share its weights, and nothing else")  # fmt: skip
    add = parser.add_argument_group("the plan").add_argument
    add("--pass", dest="passes", choices=(*PASSES, "all"), default="all", help="what to plan (default all)")
    names = f"of training: {', '.join(SCHEDULES)}; of decode: {', '.join(DECODE_SCHEDULES)}"
    add("--schedule", default="auto", help=f"{names} (default auto)")
    add("--grid", type=_grid, help="pin the grid, for instance 4x16")
    add("--grid-backward", type=_grid, help="pin the backward's grid")
    add("--head-chunks", type=parse_count, help="pin the number of head chunks")
    add("--memory-budget", type=parse_bytes, help="of a rank's communication buffers, for instance 2GB")
    add("--ulysses-size", type=parse_count, help="pin the number of ranks that exchange heads")
    add("--all", action="store_true", help="print every candidate (default: the chosen one, the fastest, the rivals)")
    add("--json", action="store_true", help="print all candidates as one JSON object instead of tables")
    add("--csv", type=Path, help="also write all candidates into this file")
    return parser


def _documents(text: str) -> tuple[int, ...]:
    """ "200x2k,1x128k" as the lengths of 201 documents."""
    lengths: list[int] = []
    for part in text.lower().split(","):
        count, cross, tokens = part.strip().partition("x")
        if not cross:
            raise argparse.ArgumentTypeError(f"{text!r} is not COUNTxTOKENS,..., for instance 200x2k,1x128k")
        lengths += [parse_count(tokens)] * parse_count(count)
    return tuple(lengths)


def _grid(text: str) -> tuple[int, int]:
    positive = "positive " * text.lower().replace("x", "", 1).isdecimal()
    return parse_grid(text, f"must be two {positive}integers, for instance 4x16")


def run(args: argparse.Namespace) -> None:
    """Plan, print, and write the CSV. Raises ValueError for options that don't fit together."""
    topology = load_topology(args.topology)
    passes = PASSES if args.passes == "all" else (args.passes,)
    if args.documents is not None and (args.batch > 1 or "decode" in passes):
        raise ValueError("--documents are packed in one row, for training: leave --batch out, and select --pass")
    h_kv = args.kv_heads or args.heads
    check_heads(args.heads, h_kv, args.tp)
    _check_schedule(args.schedule, passes)
    ranks = args.ranks_per_node or topology.host_size
    if args.nodes * ranks % args.tp:
        raise ValueError(f"--tp {args.tp} must divide the {args.nodes} x {ranks} ranks")
    hosts = [n // ranks for n in range(0, args.nodes * ranks, args.tp)]
    if args.model is not None:
        if args.tp > 1:
            raise ValueError("--model plans every way to share the weights, tensor parallelism too: leave --tp out")
        _model(args, topology, hosts)
        return
    placement = place(topology, hosts)
    shape = Shape(args.heads, h_kv, args.head_dim, args.head_dim_v or args.head_dim).over(args.tp)
    documents = None
    if args.documents is not None:
        documents = spread_documents(args.documents, len(hosts))
        args.seq_len = documents.num_rows * len(hosts)
    tables, reasons = {}, {}
    if {"forward", "backward"} & set(passes):
        training, reasons["training"] = _training(args, topology, placement, shape, documents)
        tables |= {name: entries for name, entries in training.items() if name in passes}
    if "decode" in passes:
        tables["decode"], reasons["decode"] = _decode(args, topology, placement, shape)
    if args.csv:
        _write(args.csv, [e for entries in tables.values() for e in entries], topology)
    if args.json:
        found = {name: [_values(e, topology) for e in entries] for name, entries in tables.items()}
        print(json.dumps({"topology": topology.name, "ranks": len(hosts), **found, "reasons": reasons}, indent=1))
        return
    mask = "no mask" if args.full else "causal"
    tp = f", tensor parallel over {args.tp}" if args.tp > 1 else ""
    print(
        f"{len(hosts)} ranks, {args.nodes} x {ranks}{tp}, on {topology.name}; batch {args.batch}, "
        f"{args.seq_len} tokens, {shape.num_heads} heads, "
        f"{shape.num_heads_kv} KV heads, head_dim {shape.head_dim}, {args.dtype}, {mask}"
    )
    for name, entries in tables.items():
        _print(name, entries, topology, everything=args.all)
    for name, reason in reasons.items():
        print(f"\n{name}: {reason}")
    if args.csv:
        print(f"\nall candidates are in {args.csv}")


def _model(args, topology: Topology, hosts: list[int]) -> None:
    """Every way to share the weights of --model; the fastest is marked."""
    sizes = dict(batch=args.batch, seq_len=args.seq_len, bytes_per_word=BYTES[args.dtype])
    costs = plan_step(load_model_sizes(args.model), topology, hosts, **sizes)
    if args.csv:
        _write_rows(args.csv, [cost._asdict() for cost in costs])
    if args.json:
        found = [cost._asdict() for cost in costs]
        print(json.dumps({"topology": topology.name, "ranks": len(hosts), **sizes, "ways": found}, indent=1))
        return
    print(f"a decode step of {args.model} on {len(hosts)} ranks of {topology.name}; batch {args.batch}, {args.seq_len} "
          f"tokens each, {args.dtype}; predicted")  # fmt: skip
    rows = [["", "weights", "head groups", "weights read", "cache read", "sent", "reading", "time"]]
    fastest = min(cost.time_s for cost in costs)
    for cost in costs:
        figures = map(format_bytes, (cost.weight_bytes, cost.cache_bytes, cost.sent_bytes))
        times = map(format_seconds, (cost.read_s, cost.time_s))
        rows.append(["*" * (cost.time_s == fastest), cost.way, str(cost.head_groups), *figures, *times])
    _print_rows(rows)


def _check_schedule(schedule: str, passes: tuple[str, ...]) -> None:
    for name in passes:
        choices = DECODE_SCHEDULES if name == "decode" else SCHEDULES
        if schedule not in choices:
            raise ValueError(
                f"--schedule {schedule} does not apply to the {name}: choose {', '.join(choices)}, or select "
                f"the passes that it applies to with --pass"
            )


def _training(
    args, topology: Topology, placement: Placement, shape: Shape, documents: Dispatched | None
) -> tuple[dict[str, list[Entry]], str]:
    visible, mask = 1.0, None
    if documents is not None:
        shares = Sharding(seq_len=args.seq_len, world=len(placement.order), layout=documents)
        mask = Mask(Visibility(args.window, None if args.full else 0), shares, shares)
        visible = documents.pairs / args.seq_len**2
    elif args.window is not None:
        shares = Sharding(seq_len=args.seq_len, world=len(placement.order), layout="zigzag")
        shard_lengths(args.seq_len, shares.world, shares.layout)
        mask = Mask(Visibility(args.window, None if args.full else 0), shares, shares)
        visible = min(1.0, (args.window + 1) / args.seq_len * (1 if args.full else 2))
    plan = plan_training(
        len(placement.order),
        shape,
        batch=args.batch,
        seq_len=args.seq_len,
        bytes_per_word=BYTES[args.dtype],
        causal=not args.full,
        visible=visible,
        mask=mask,
        topology=topology,
        placement=placement,
        schedule=args.schedule,
        ulysses_size=args.ulysses_size,
        grid=args.grid,
        grid_backward=args.grid_backward,
        head_chunks=args.head_chunks,
        memory_budget=args.memory_budget,
    )
    tables = {
        name: [_entry(name, c, c == chosen, args) for c in table]
        for name, chosen, table in zip(PASSES, (plan.forward, plan.backward), plan.candidates)
    }
    return tables, plan.reason


def _decode(args, topology: Topology, placement: Placement, shape: Shape) -> tuple[list[Entry], str]:
    world = len(placement.order)
    shard = -(-args.seq_len // world) * args.batch * shape.num_heads_kv * (shape.head_dim + shape.head_dim_v)
    plan = plan_decode(
        world,
        rows=args.batch * args.queries * shape.num_heads,
        head_dim_v=shape.head_dim_v,
        kv_bytes=shard * BYTES[args.dtype],
        topology=topology,
        placement=placement,
        schedule=args.schedule,
        memory_budget=args.memory_budget,
        own_heads=args.own_heads,
    )
    chosen = (plan.schedule, plan.across)
    return [_entry("decode", c, (c.schedule, c.across) == chosen, args) for c in plan.candidates], plan.reason


def _entry(name: str, candidate: PassPlan | Reduction, chosen: bool, args) -> Entry:
    fits = args.memory_budget is None or candidate.cost.peak_bytes <= args.memory_budget
    return Entry(name, candidate, chosen, fits)


def _print(name: str, entries: list[Entry], topology: Topology, *, everything: bool) -> None:
    """A table of the chosen candidate, the fastest one, and the fastest of every rival; of a decode step, of all."""
    levels = [f"over {level.name}" for level in topology.levels]
    rows = [["", name, "time", "of it compute", *levels, "steps", "buffers", ""]]
    rivals = {rival: i for i, e in reversed([*enumerate(entries)]) for rival in rival_names(e.candidate)}
    shown = {0, *rivals.values(), *(i for i, e in enumerate(entries) if everything or e.chosen or name == "decode")}
    for i in sorted(shown):
        e = entries[i]
        names = [rival for rival, at in rivals.items() if at == i and rival != str(e.candidate)]
        notes = ["chosen"] * e.chosen + ["fastest"] * (i == 0) + ["beyond --memory-budget"] * (not e.fits)
        note = ", ".join(notes + sorted(names))
        sent = [format_bytes(n) for n in e.cost.bytes_per_level]
        times = [format_seconds(e.cost.time_s), format_seconds(e.cost.compute_s)]
        rows.append(
            ["*" * e.chosen, str(e.candidate), *times, *sent, str(e.cost.steps), format_bytes(e.cost.peak_bytes), note]
        )
    _print_rows(rows)
    if len(shown) < len(entries):
        print(f"   {len(entries) - len(shown)} more: --all")


def _print_rows(rows: list[list[str]]) -> None:
    """Columns: a mark and a name to the left, what begins with a digit and its heading to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    right = [any(cell[:1].isdigit() for cell in column) for column in zip(*rows)]
    print()
    for row in rows:
        cells = (cell.rjust(w) if to_right else cell.ljust(w) for cell, w, to_right in zip(row, widths, right))
        print("  ".join(cells).rstrip())


def _values(e: Entry, topology: Topology) -> dict:
    """A candidate in plain values; those that it doesn't have are None."""
    found = {"schedule": e.candidate.schedule, "heads": None, "grid": None, "inner": None, "head_chunks": None}
    if isinstance(e.candidate, PassPlan):
        pairs = dict(heads=e.candidate.arrangement.heads, grid=e.candidate.grid, inner=e.candidate.inner)
        found |= {name: "x".join(map(str, pair)) for name, pair in pairs.items()}
        found["head_chunks"] = e.candidate.head_chunks
    cost, levels = e.cost, (f"bytes_over_{level.name}" for level in topology.levels)
    found |= {"across": getattr(e.candidate, "across", None), "time_s": cost.time_s, "compute_s": cost.compute_s}
    found |= dict(zip(levels, cost.bytes_per_level)) | {"steps": cost.steps, "peak_bytes": cost.peak_bytes}
    return found | {"chosen": e.chosen, "rivals": rival_names(e.candidate)}


def _write(path: Path, entries: list[Entry], topology: Topology) -> None:
    _write_rows(path, [{"pass": e.name, **_values(e, topology), "chosen": int(e.chosen)} for e in entries])


def _write_rows(path: Path, rows: list[dict]) -> None:
    with whole_file(path) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name != "rivals"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
