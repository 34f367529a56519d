"""Print the plan of an attention call on a cluster and its rivals, with their predicted cost."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from math import sqrt

from ..arguments import Parser
from ..layout import Sharding, shard_lengths, spread_documents
from ..spec import MaskBounds
from ..units import format_bytes, format_seconds, parse_bytes, parse_count
from .choice import fits
from .planner import plan_decode, plan_training
from .plans import PassPlan, ReductionPlan, Shape, check_heads, rival_names
from .published import comparisons, ordered
from .topology import Topology, known_topologies, load_topology, place
from .training import Mask

EXAMPLES = """\
examples:
  megatron-tree plan --topology dgx_h100 --nodes 16 --seq-len 1M --heads 32 --kv-heads 8 --head-dim 128
  megatron-tree plan --topology ethernet --nodes 4 --ranks-per-node 4 --pass decode --seq-len 128k
  megatron-tree plan --topology dgx_h100 --nodes 8 --pass backward --memory-budget 2GB --json
  megatron-tree plan --topology dgx_h100 --nodes 8 --pass jvp --seq-len 64k --kv-heads 8
  megatron-tree plan --topology mine.yaml --nodes 32 --seq-len 1M --all
  megatron-tree plan --topology dgx_h100 --nodes 8 --heads 64 --kv-heads 8 --head-dim 64 --window 127
  megatron-tree plan --topology dgx_h100 --nodes 8 --pass forward --documents 200x2k,1x128k
  megatron-tree plan --topology dgx_h100 --nodes 8 --tp 8 --heads 64 --kv-heads 8 --pass backward

k, M and G are 1024, 1024^2 and 1024^3 tokens; kB, MB, GB (10^3 ...) and KiB, MiB, GiB (2^10 ...) are bytes.
"""
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
TRAINING, DUAL = ("forward", "backward"), ("jvp", "second")
PASSES = (*TRAINING, "decode")


def main(argv: list[str]) -> int:
    """Print the tables; 0 if there is a plan, 2 for invalid options."""
    args = _parser().parse_args(argv)
    try:
        run(args)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"megatron-tree plan: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megatron-tree plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("the machine").add_argument
    add("--topology", required=True, help=f"{', '.join(known_topologies())}, or the path of a .yaml file")
    add("--nodes", type=parse_count, default=1, help="hosts (default 1)")
    add("--ranks-per-node", type=parse_count, help="ranks on each host (default: as many as the topology says)")
    add("--tp", type=parse_count, default=1, help="tensor-parallel ranks, which are neighbours and share the heads; "
        "the others share the sequence (default 1)")  # fmt: skip
    add("--published", action=_Published, nargs=0, help="print what others measured on GPUs, and predictions")
    add = parser.add_argument_group("the call").add_argument
    add("--seq-len", type=parse_count, default=1 << 17, help="tokens of the whole sequence (default 128k)")
    add("--documents", type=_documents, help="COUNTxTOKENS,...: packed documents instead, dispatched over the ranks")
    add("--batch", type=parse_count, default=1, help="sequences (default 1)")
    add("--heads", type=parse_count, default=32, help="query heads (default 32)")
    add("--kv-heads", type=parse_count, help="KV heads (default: as many as query heads)")
    add("--head-dim", type=parse_count, default=128, help="of queries, keys and values (default 128)")
    add("--dtype", choices=BYTES, default="bf16", help="of q, k, v and the messages (default bf16)")
    add("--window", type=parse_count, help="keys that a query sees before itself (default: all)")
    add = parser.add_argument_group("the plan").add_argument
    add("--pass", dest="passes", choices=("all", *PASSES, *DUAL), default="all", help="what to plan: forward, backward "
        "and decode (all, the default) or one of them; a forward with tangents (jvp); a second-order pass (second)",
        )  # fmt: skip
    add("--memory-budget", type=parse_bytes, help="of a rank's communication buffers, for instance 2GB")
    add("--all", action="store_true", help="print every candidate (default: the chosen one, the fastest, the rivals)")
    add("--json", action="store_true", help="print all candidates as one JSON object instead of tables")
    return parser


class _Published(argparse.Action):
    """Prints all comparisons and ends, as --help does."""

    def __call__(self, parser, *args):
        compared = comparisons()
        right, wrong = ordered(compared)
        for (what, source), group in itertools.groupby(compared, key=lambda c: c[:2]):
            print(f"\n{what}: {source}", end="")
            rows = [["", "", "", "measured", "predicted", "ratio"]]
            for c in group:
                mark = "!" * any(c in pair for pair in wrong)
                times = format_seconds(c.measured), format_seconds(c.predicted)
                rows.append([mark, c.case, c.name, *times, f"{c.ratio:.2f}"])
            _print_rows(rows)
        print(f"\n{len(right)} of {len(right) + len(wrong)} orders are as measured (! where one is not)")
        parser.exit()


def _documents(text: str) -> tuple[int, ...]:
    """ "200x2k,1x128k" as the lengths of 201 documents."""
    lengths: list[int] = []
    for part in text.lower().split(","):
        count, cross, tokens = part.strip().partition("x")
        if not (count and cross and tokens):
            raise argparse.ArgumentTypeError(f"{text!r} is not COUNTxTOKENS,..., for instance 200x2k,1x128k")
        lengths += [parse_count(tokens)] * parse_count(count)
    return tuple(lengths)


def run(args: argparse.Namespace) -> None:
    """Plan and print. Raises ValueError for options that don't fit together."""
    topology = load_topology(args.topology)
    passes = PASSES if args.passes == "all" else (args.passes,)
    args.kv_heads = args.kv_heads or args.heads
    check_heads(args.heads, args.kv_heads, args.tp)
    ranks = args.ranks_per_node or topology.host_size
    if args.nodes * ranks % args.tp:
        raise ValueError(f"--tp {args.tp} must divide the {args.nodes} x {ranks} ranks")
    hosts = [n // ranks for n in range(0, args.nodes * ranks, args.tp)]
    if args.documents is not None and (args.batch > 1 or "decode" in passes):
        raise ValueError("--documents are packed in one row, for training: leave --batch out, and select --pass")
    shape = Shape(args.heads, args.kv_heads, args.head_dim, args.head_dim).over(args.tp)
    bound = _bound(args, topology, hosts, shape) if set(TRAINING) & set(passes) else None
    tables, chosen, reasons = {}, [], {}
    for of_plan, what in ((TRAINING, "training"), (DUAL, "derivatives")):
        if set(of_plan) & set(passes):
            plan = _training(args, topology, hosts, shape, dual=of_plan == DUAL)
            tables |= {name: table for name, table in zip(of_plan, plan.candidates) if name in passes}
            chosen += [plan.forward, plan.backward]
            reasons[what] = plan.reason
    if "decode" in passes:
        plan = _decode(args, topology, hosts, shape)
        tables["decode"] = plan.candidates
        chosen += [c for c in plan.candidates if (c.schedule, c.across) == (plan.schedule, plan.across)]
        reasons["decode"] = plan.reason
    if args.json:
        candidates = {name: [_values(c, c in chosen, topology) for c in table] for name, table in tables.items()}
        call = {"topology": topology.name, "ranks": len(hosts), "least_bytes": bound}
        print(json.dumps({**call, **candidates, "reasons": reasons}, indent=1))
        return
    tp = f", tensor parallel over {args.tp}" if args.tp > 1 else ""
    print(
        f"{len(hosts)} ranks, {args.nodes} x {ranks}{tp}, on {topology.name}; batch {args.batch}, "
        f"{args.seq_len} tokens, {shape.num_heads} heads, "
        f"{shape.num_heads_kv} KV heads, head_dim {shape.head_dim}, {args.dtype}, causal"
    )
    for name, table in tables.items():
        _print(name, table, chosen, topology, args)
    for name, reason in reasons.items():
        print(f"\n{name}: {reason}")
    if bound:
        top = place(topology, hosts).top
        sent = {name: c.cost.bytes_per_level[top] for name in TRAINING for c in tables.get(name, ()) if c in chosen}
        times = ", ".join(f"{name} {n / bound:.3g} times that" for name, n in sent.items())
        print(f"\nlower bound without a mask: {format_bytes(bound)} over {topology.levels[top].name}; {times}")


def _bound(args, topology: Topology, hosts: list[int], shape: Shape) -> float | None:
    """`least_bytes` between units of the outermost level; None for documents and windows, and where units differ."""
    placement, world = place(topology, hosts), len(hosts)
    top = placement.top
    nodes = len({units[top - 1] for units in placement.units}) if top else world
    if args.documents is not None or args.window is not None or nodes * placement.block != world:
        return None
    tokens, word = -(-args.seq_len // world), BYTES[args.dtype]
    return least_bytes(nodes, shape, batch=args.batch, tokens=tokens, bytes_per_word=word)


def _training(args, topology: Topology, hosts: list[int], shape: Shape, dual: bool):
    fraction, mask, layout = 1.0, None, "zigzag"
    if args.documents is not None:
        layout = spread_documents(args.documents, len(hosts))
        args.seq_len = layout.num_rows * len(hosts)
        fraction = layout.pairs / args.seq_len**2
    elif args.window is not None:
        shard_lengths(args.seq_len, len(hosts), layout)
        fraction = min(1.0, 2 * (args.window + 1) / args.seq_len)
    if args.documents is not None or args.window is not None:
        sharding = Sharding(seq_len=args.seq_len, world=len(hosts), layout=layout)
        mask = Mask(MaskBounds(args.window, 0), sharding, sharding)
    return plan_training(
        len(hosts),
        shape,
        batch=args.batch,
        seq_len=args.seq_len,
        bytes_per_word=BYTES[args.dtype],
        visible_fraction=fraction,
        with_lse=dual,
        dual=dual,
        mask=mask,
        topology=topology,
        placement=place(topology, hosts),
        memory_budget=args.memory_budget,
    )


def _decode(args, topology: Topology, hosts: list[int], shape: Shape):
    words = -(-args.seq_len // len(hosts)) * args.batch * shape.num_heads_kv * (shape.head_dim + shape.head_dim_v)
    return plan_decode(
        len(hosts),
        rows=args.batch * shape.num_heads,
        head_dim_v=shape.head_dim_v,
        kv_bytes=words * BYTES[args.dtype],
        topology=topology,
        placement=place(topology, hosts),
        memory_budget=args.memory_budget,
    )


def _print(name: str, table, chosen: list, topology: Topology, args) -> None:
    """A table of the chosen candidate, the fastest one, and the fastest of every rival; of a decode step, of all."""
    levels = [f"over {level.name}" for level in topology.levels]
    rows = [["", name, "time", "of it compute", *levels, "steps", "buffers", ""]]
    rivals = {rival: i for i, c in reversed([*enumerate(table)]) for rival in rival_names(c)}
    everything = args.all or name == "decode"
    shown = sorted({0, *rivals.values(), *(i for i, c in enumerate(table) if everything or c in chosen)})
    for i in shown:
        candidate, cost = table[i], table[i].cost
        notes = ["chosen"] * (candidate in chosen) + ["fastest"] * (i == 0)
        notes += ["beyond --memory-budget"] * (not fits(candidate, args.memory_budget))
        notes += sorted(rival for rival, at in rivals.items() if at == i and rival != str(candidate))
        times = [format_seconds(cost.time_s), format_seconds(cost.compute_s)]
        sent = [format_bytes(n) for n in cost.bytes_per_level]
        mark, buffers = "*" * (candidate in chosen), format_bytes(cost.peak_bytes)
        rows.append([mark, str(candidate), *times, *sent, str(cost.steps), buffers, ", ".join(notes)])
    _print_rows(rows)
    if len(shown) < len(table):
        print(f"   {len(table) - len(shown)} more: --all")


def _print_rows(rows: list[list[str]]) -> None:
    """Columns: a mark and a name to the left, what begins with a digit and its heading to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    right = [any(cell[:1].isdigit() for cell in column) for column in zip(*rows)]
    print()
    for row in rows:
        cells = (cell.rjust(w) if to_right else cell.ljust(w) for cell, w, to_right in zip(row, widths, right))
        print("  ".join(cells).rstrip())


def _values(candidate: PassPlan | ReductionPlan, chosen: bool, topology: Topology) -> dict:
    """A candidate in plain values; those that it doesn't have are None."""
    values = {"schedule": candidate.schedule, "heads": None, "grid": None, "inner": None, "head_chunks": None}
    if isinstance(candidate, PassPlan):
        pairs = dict(heads=candidate.arrangement.heads, grid=candidate.grid, inner=candidate.inner)
        values |= {name: "x".join(map(str, pair)) for name, pair in pairs.items()}
        values["head_chunks"] = candidate.head_chunks
    cost, levels = candidate.cost, (f"bytes_over_{level.name}" for level in topology.levels)
    values |= {"across": getattr(candidate, "across", None), "time_s": cost.time_s, "compute_s": cost.compute_s}
    values |= dict(zip(levels, cost.bytes_per_level)) | {"steps": cost.steps, "peak_bytes": cost.peak_bytes}
    return values | {"chosen": chosen, "rivals": rival_names(candidate)}


def least_rows(nodes: int, num_heads: int, num_heads_kv: int) -> float:
    """Rows of other nodes' tokens, of queries or keys of one head, that a node needs per token of its own (mean).

    Nodes hold equally many tokens and compute equally many pairs. A query's row goes with its result, a key's
    with its value. Memory is unlimited.
    """
    queries = num_heads // num_heads_kv
    if queries >= nodes - 1:
        return num_heads_kv * (nodes - 1)
    whole_heads = (num_heads + num_heads_kv) * (nodes - 1) / nodes
    area = num_heads * (nodes - 1) + queries
    keys = min(nodes, sqrt(area))
    return max(whole_heads, keys + area / keys - queries - 1)


def least_bytes(nodes: int, shape: Shape, *, batch: int, tokens: int, bytes_per_word: int) -> float:
    """Bytes that a rank sends to other nodes in a forward at least, and as many in a backward; the mean over the ranks.

    nodes: with equally many ranks each. tokens: of one rank's shard.
    """
    h, h_kv, d, d_v = shape
    return least_rows(nodes, h, h_kv) * batch * tokens * (d + d_v) * bytes_per_word
