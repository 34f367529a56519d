"""Run a script on a cluster emulated on this Linux machine: real ranks on nodes connected by a network of given speed.

Each node is a network namespace. A switch between them limits each node's sending and receiving to RATE, and delays
every packet by LATENCY. There is no delay between ranks on one node. Needs root, /dev/net/tun and a C compiler.

Every rank runs the script, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set as by
the deepspeed launcher. Ranks are forked after torch is imported: they start fast, with the same random state.
The exit status is that of the first rank that fails. See docs/emulation.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

EXAMPLES = """\
examples:
  python launch/emulate.py --nodes 4 --ranks-per-node 4 --latency 1ms --rate 1gbit -- my_script.py --my-option 3
  python launch/emulate.py --nodes 2 -- -m megatron_tree calibrate --out my_cluster.yaml
  python launch/emulate.py --nodes 8 --latency 20us --rate 5gbit --timeout 2min -- my_script.py
"""


def build_parser() -> argparse.ArgumentParser:
    from megatron_tree.core.units import parse_bits_per_second, parse_seconds

    parser = argparse.ArgumentParser(
        prog="emulate.py",
        usage="python launch/emulate.py [OPTION ...] -- SCRIPT [ARGUMENT ...]",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    add("--ranks-per-node", type=int, default=1, help="ranks on each node (default: 1)")
    add("--latency", type=parse_seconds, default=1e-3, metavar="TIME", help="one way between nodes (default: 1ms)")
    add("--rate", type=parse_bits_per_second, default=1e9, metavar="RATE", help="of each node's port (default: 1gbit)")
    add("--timeout", type=parse_seconds, default=3600.0, metavar="TIME", help="of everything: 90s, 2min (default: 1h)")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]", help="or: -m MODULE ...")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    from megatron_tree.tools.emulate import Cluster, Unavailable

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        cluster = Cluster(
            nodes=args.nodes,
            ranks_per_node=args.ranks_per_node,
            latency_s=args.latency,
            rate_bits=args.rate,
            lifetime_s=args.timeout + 60,
        )
        with cluster:
            return cluster.run_script(script, on_line=_print_line, timeout_s=args.timeout)
    except (ValueError, Unavailable, RuntimeError) as error:
        print(f"emulate.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the machine's cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # suppresses warnings on every rank that nodes have no names
    sys.exit(main(sys.argv[1:]))
