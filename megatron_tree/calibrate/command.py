"""Measure the links between ranks and the kernels on them, and write a topology for the planner.

Start it on the machines and with the ranks that you want to plan for:

  deepspeed --hostfile hostfile --no_local_rank --module megatron_tree calibrate --out my_cluster.yaml

Then pass TreeConfig(topology="my_cluster.yaml") or `--topology my_cluster.yaml`. Rank 0 writes the file. On GPUs, each
machine also keeps which backend is fastest on them, for backend="auto". Calibration takes about a minute. Other load on
the machines distorts the results.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

TIMEOUT_S = 300.0  # of a single wait
EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 -m megatron_tree calibrate --out laptop.yaml
  deepspeed --hostfile hostfile --no_local_rank --module megatron_tree calibrate --out my_cluster.yaml
  python launch/emulate.py --nodes 4 --ranks-per-node 4 -- -m megatron_tree calibrate --out emulated.yaml --no-compute
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-tree calibrate",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE.yaml", help="the file to write; its name is the topology's")
    add("--no-compute", action="store_true", help="don't run kernels: write the default topology's figures for them")
    return parser


def _check(args: argparse.Namespace, environ) -> None:
    """Raise ValueError for invalid options, before anything is started."""
    if args.out.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--out {args.out}: a topology file ends in .yaml")
    if not args.out.absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {args.out.absolute().parent}")
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in environ]:
        raise ValueError(f"{', '.join(missing)} not set: start it with a launcher, on every rank\n\n{EXAMPLES}")


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        _check(args, os.environ)
    except ValueError as error:
        if rank == 0:
            print(f"calibrate: {error}", file=sys.stderr)
        return 2
    from ..launching import exit_after_failure

    try:
        _run(args, rank)
    except BaseException as error:
        exit_after_failure(rank, error)
    return 0


def _run(args: argparse.Namespace, rank: int) -> None:
    import torch.distributed as dist

    from .. import comm
    from ..comm.rendezvous import start_on_own_device
    from ..launching import together

    device = start_on_own_device(TIMEOUT_S)
    with together(args, comm.Ranks.of(dist.group.WORLD, limit_s=TIMEOUT_S)):
        pass
    with comm.monitored("calibration"):
        _calibrate(args, rank, device)
    dist.barrier()
    dist.destroy_process_group()


def _calibrate(args: argparse.Namespace, rank: int, device) -> None:
    from ..plan import default_topology, save_topology
    from .cluster import calibrate

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    assumed = default_topology("nccl" if device.type == "cuda" else "gloo") if args.no_compute else None
    calibrated = calibrate(
        device,
        name=args.out.stem,
        memory_bandwidth=assumed and assumed.memory_bandwidth,
        flops=assumed and assumed.flops,
        timeout_s=TIMEOUT_S,
        say=say,
    )
    table = calibrated.table
    if device.type == "cuda" and not args.no_compute and os.environ.get("LOCAL_RANK", "0") == "0":
        from .backends import keep_fastest

        say("forward and backward with each backend")
        table += keep_fastest(device)
    width = max(len(what) for what, _ in table)
    say("\n" + "\n".join(f"{what:<{width}}  {value}" for what, value in table))
    if rank == 0:
        save_topology(calibrated.topology, args.out)
        say(f"\nwritten to {args.out}")
