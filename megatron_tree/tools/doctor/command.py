"""Report what is installed, which kernels and network a configuration would use, and what is missing.

With --compare, run a training step of a model on one rank and on several, and name the first layer that differs."""

from __future__ import annotations

import argparse
import sys

from ...core.config import CP_COMM_TYPES
from ...core.plan import check_heads
from ...core.units import parse_count
from ...inference.serving.arguments import check_model, check_readable
from ...launching import new_parser

EXAMPLES = """\
examples:
  megatron-tree doctor
  megatron-tree doctor --cp 16 --tp 4 --heads 64 --kv-heads 8
  megatron-tree doctor --for deepspeed --cp 4 --dtype fp16

In the first column, ! marks what is required but missing, - what works but could be better. The exit status is 1 if
anything is marked !, 2 if the options contradict one another.
"""
COMPARISONS = """
a model's step on 1 rank and on 4, of this machine's CPU; ! marks values that differ by more than rounding, - bits:
  megatron-tree doctor --compare /models/llama --ranks 4 --text README.md --tokens 512
"""
STEP = {"ranks": 2, "tokens": 256, "text": None}  # options of --compare and their defaults


def main(argv: list[str]) -> int:
    """Print the findings. Returns 0, 1 if something required is missing or differs, 2 for invalid options."""
    args = _parser().parse_args(argv)
    from . import findings

    if args.compare is not None:
        return _compare(args)

    args.kv_heads = args.kv_heads or args.heads
    try:
        for name in STEP:
            if (value := getattr(args, name)) is not None:
                raise ValueError(f"--{name} {value} needs --compare MODEL")
        check_heads(args.heads, args.kv_heads, args.tp)
        if args.cp_comm_type == "a2a" and args.cp * args.tp > args.heads:
            raise ValueError(
                f"--cp-comm-type a2a: --cp {args.cp} ranks can't share {args.heads // args.tp} query heads (--heads "
                f"{args.heads} over --tp {args.tp}): use tree, or at most {args.heads // args.tp} ranks"
            )
        sections = [findings.packages(args.purpose), findings.devices(), findings.network(args.cp * args.tp)]
        if args.purpose == "megatron":
            sections.append(findings.megatron(args.cp, args.cp_comm_type))
        sections.append(findings.kernels(args))
    except (ValueError, OSError) as error:
        print(f"megatron-tree doctor: {error}", file=sys.stderr)
        return 2
    print(findings.as_text(sections))
    return 1 if findings.missing(sections) else 0


def _compare(args: argparse.Namespace) -> int:
    for name, default in STEP.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    try:
        check_model("--compare: model", args.compare)
        check_readable("--text", args.text)
        from . import findings
        from .step import compare_steps

        section = compare_steps(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"megatron-tree doctor: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    print(findings.table(section))
    return 1 if findings.missing([section]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("megatron-tree doctor", __doc__, EXAMPLES + COMPARISONS, config=False)
    add = parser.add_argument
    add(
        "--for",
        dest="purpose",
        choices=("functions", "megatron", "deepspeed"),
        default="megatron",
        help="the framework (default megatron)",
    )
    add = parser.add_argument_group("the configuration").add_argument
    add("--cp", type=parse_count, default=8, help="context-parallel ranks (default 8)")
    add("--tp", type=parse_count, default=1, help="tensor-parallel ranks (default 1)")
    add("--heads", type=parse_count, default=32, help="query heads of the model (default 32)")
    add("--kv-heads", type=parse_count, help="KV heads of the model (default: as many as query heads)")
    add("--head-dim", type=parse_count, default=128, help="(default 128)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of q, k and v (default bf16)")
    add("--cp-comm-type", choices=CP_COMM_TYPES, default="tree", help="Megatron's option (default tree)")
    add = parser.add_argument_group("the comparison").add_argument
    add("--compare", metavar="MODEL", help="a Transformers model folder, or smollm2; nothing else is reported")
    add("--ranks", type=parse_count, metavar="N", help="CPU processes of this machine (default 2)")
    add("--tokens", type=parse_count, help="of the sequence, at most (default 256)")
    add("--text", metavar="FILE", help="its beginning is the sequence (default: random tokens)")
    return parser
