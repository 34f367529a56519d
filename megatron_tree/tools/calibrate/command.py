"""Measure the links between ranks and the kernels on them, and write a topology for the planner.

Start it on the machines and with the ranks that you want to plan for:

  deepspeed --hostfile hostfile --no_local_rank --module megatron_tree calibrate --out my_cluster.yaml

Then pass TreeConfig(topology="my_cluster.yaml") or `--topology my_cluster.yaml`. Rank 0 writes the file. On GPUs, each
machine also keeps which backend is fastest on them, for backend="auto". Calibration takes about a minute. Other load on
the machines distorts the results.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

from ...launching import check_launched, new_parser, run_script, together

TIMEOUT_S = 300.0  # of a single wait
EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 -m megatron_tree calibrate --out laptop.yaml
  deepspeed --hostfile hostfile --no_local_rank --module megatron_tree calibrate --out my_cluster.yaml
"""


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("megatron-tree calibrate", __doc__, EXAMPLES)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE.yaml", help="the file to write; its name is the topology's")
    add("--no-compute", action="store_true", help="don't run kernels: write the default topology's figures for them")
    return parser


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Raise ValueError for invalid options, before anything is started."""
    if args.out.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--out {args.out}: a topology file ends in .yaml")
    if not args.out.absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {args.out.absolute().parent}")
    check_launched("-m megatron_tree calibrate --out FILE.yaml")


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    load = lambda: (run, ())  # noqa: E731
    return run_script("megatron-tree calibrate", argv, build_parser, check_arguments, load, choices=False)


def run(args: argparse.Namespace) -> None:
    """Calibrate, on this rank; collective over all ranks."""
    import torch.distributed as dist

    from ...core import comm
    from ...core.comm.rendezvous import start_on_own_device

    device = start_on_own_device(TIMEOUT_S)
    with together(args, comm.Ranks.of(dist.group.WORLD, limit_s=TIMEOUT_S)):
        pass
    with comm.monitored("calibration"):
        _calibrate(args, device)
    dist.barrier()
    dist.destroy_process_group()


def _calibrate(args: argparse.Namespace, device) -> None:
    import torch.distributed as dist

    from ...core.plan import default_topology, save_topology
    from .cluster import calibrate
    from .kernel_cases import keep_fastest

    say = functools.partial(print, flush=True) if dist.get_rank() == 0 else lambda line: None
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
        say("forward and backward with each backend")
        table += keep_fastest(device)
    width = max(len(what) for what, _ in table)
    say("\n" + "\n".join(f"{what:<{width}}  {value}" for what, value in table))
    if dist.get_rank() == 0:
        save_topology(calibrated.topology, args.out)
        say(f"\nwritten to {args.out}")
