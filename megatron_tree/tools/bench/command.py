"""Command line of the benchmarks."""

from __future__ import annotations

import importlib
import sys

from ...core.files import NotWritten, why_uncreatable
from .options import build_parser


def main(argv: list[str]) -> int:
    """Run one benchmark; 0 if its results were correct and its files are written, 2 for options that can't be."""
    args = build_parser().parse_args(argv)
    args.argv = argv
    if (fault := why_uncreatable(args.out.absolute())) is not None:
        what = f"--out {args.out} can't be created: {fault}; name another folder"
        print(f"megatron-tree bench {args.command}: {what}", file=sys.stderr)
        return 2
    benchmark = importlib.import_module(f".{args.command}", __package__)
    from ..calibrate.kernel_cases import WrongResult
    from ..emulate import Unavailable

    try:
        benchmark.run(args)
    except (ValueError, WrongResult, Unavailable, NotWritten) as error:
        print(f"megatron-tree bench {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    return 0
