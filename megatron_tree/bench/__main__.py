"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys

from . import kernels

EXAMPLES = """\
examples:
  python -m megatron_tree.bench kernels                         everything, on the GPU; results in bench-results/kernels
  python -m megatron_tree.bench kernels --race                  try other tile sizes first, and print the best
  python -m megatron_tree.bench kernels --only decode --dtype fp16
  python -m megatron_tree.bench kernels --device cpu            small shapes: aten and reference beside torch's SDPA
"""


def main(argv: list[str]) -> int:
    """Run one benchmark; 0 if its results were right and it wrote its files."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_tree.bench",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    kernels.add_arguments(commands.add_parser("kernels", help="attention kernels of one device"))
    args = parser.parse_args(argv)
    try:
        kernels.run(args)
    except (ValueError, kernels.WrongResult) as error:
        print(f"bench {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
