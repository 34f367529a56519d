"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import sys

from ...core.files import NotWritten

COMMANDS = {
    "kernels": "attention kernels of one device",
    "decode": "a decode step over a sharded KV cache on several ranks: all schedules, over a network",
    "generate": "a whole model with a sharded KV cache: one rank, ring and trees, token by token",
    "serve": "many requests at once by the scheduler, and as one padded batch of Transformers",
    "step": "a Llama's training step on several ranks: ours, DeepSpeed's Ulysses, torch's context parallelism",
    "train": "attention forward and backward on several ranks: the plan, ring, Ulysses, torch's own, ...",
}


def main(argv: list[str]) -> int:
    """Run one benchmark; 0 if its results were correct and its files are written."""
    parser = argparse.ArgumentParser(prog="megatron-tree bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = next((name for name in argv if not name.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:  # does not import the others
            benchmark = importlib.import_module(f".{name}", __package__)
            command.description, command.epilog = benchmark.__doc__, getattr(benchmark, "EXAMPLES", None)
            benchmark.add_arguments(command)
    args = parser.parse_args(argv)
    args.argv = argv
    from ..calibrate.kernel_cases import WrongResult
    from ..emulate import Unavailable

    try:
        benchmark.run(args)
    except (ValueError, WrongResult, Unavailable, NotWritten) as error:
        print(f"bench {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
