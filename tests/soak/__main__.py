"""Half an hour of training and generation on an emulated cluster, in which ranks are lost: see docs/reliability.md.

The ranks run the commands train and generate in turns. Every few minutes one rank is killed, or stopped, or
paused for a third of the time limit; after some kills the newest checkpoint or output is damaged as well. The others
must end with an error that names the lost rank (a pause harms nobody), and all ranks are restarted from the files on
disk. A round of each kind runs undisturbed first, and every later loss and answer must equal that round's. Memory,
descriptors, threads and ports must not grow, and nothing may be left behind. The exit status is 0 if all of that holds.
"""

import argparse
import gc
import importlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import warnings

import torch

from megatron_tree.core.units import parse_count, parse_nodes_by_ranks, parse_seconds
from megatron_tree.tools.bench.results import metadata
from megatron_tree.tools.emulate import Cluster, Unavailable
from megatron_tree.tools.emulate.network import require

from ..support.leftovers import inodes, processes_in
from .checks import accused, judge
from .soak import Incarnation, Soak
from .work import Generation, Training

PRELOADED = (  # so forked ranks start fast
    "megatron_tree.tools.training.loop",
    "megatron_tree.integrations.megatron",
    "megatron_tree.inference.serving.generate",
)
EXAMPLES = """\
examples:
  python -m tests.soak                                      what docs/reliability.md shows
  python -m tests.soak --minutes 2 --every 15 --steps 60 --requests 12
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.soak", None, __doc__, EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="after the undisturbed rounds (default: %(default)g)")
    add("--every", type=float, default=120.0, metavar="SECONDS", help="of work a fault, on average (default: 120)")
    add("--nodes", type=parse_nodes_by_ranks, default="2x2", metavar="NxM", help="(default: %(default)s)")
    add("--steps", type=parse_count, default=1000, help="of training in a round (default: %(default)s)")
    add("--requests", type=parse_count, default=400, help="prompts in a round (default: %(default)s)")
    add("--time-limit", type=parse_seconds, default="10s", help="of every wait for other ranks (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the data, the times and the ranks (default: %(default)s)")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench-results/soak.json"))
    args = parser.parse_args(argv)
    if not (args.minutes > 0 and args.every > 0 and args.nodes[0] * args.nodes[1] > 1):
        parser.error("--minutes and --every must be more than 0, and --nodes at least 2 ranks: one is lost")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            soak = _soak(args, pathlib.Path(folder).resolve())
        soak.left += [folder] if os.path.exists(folder) else []
    except Unavailable as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    checks = judge(soak)
    for c in checks:
        print(f"{'ok   ' if c.ok else 'WRONG'} {c.name}: {c.found:.4g}, allowed {c.allowed:.4g}; {c.text}", flush=True)
    told = metadata("soak", **{name: value for name, value in vars(args).items() if name != "out"})
    told["checks"] = [{**c._asdict(), "ok": c.ok} for c in checks]
    told["faults"] = [{**f._asdict(), "survivors": [s._asdict() for s in f.survivors]} for f in soak.faults]
    told["rows"] = [x._asdict() for x in soak.incarnations]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(told, indent=1))
    print(f"written to {args.out}")
    return 0 if all(check.ok for check in checks) else 1


def _soak(args: argparse.Namespace, home: pathlib.Path) -> Soak:
    require()
    (home / "tree.yaml").write_text("tune: false\n")  # results are compared more closely than plans round alike
    os.environ["MEGATRON_TREE_CONFIG"] = str(home / "tree.yaml")
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TQDM_DISABLE="1")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    with warnings.catch_warnings(action="ignore"):  # Megatron-core finds no Apex
        for name in PRELOADED:
            importlib.import_module(name)
    nodes, ranks_per_node = args.nodes
    common = dict(ranks=nodes * ranks_per_node, limit_s=args.time_limit, seed=args.seed)
    works = [Training(home, total=args.steps, **common), Generation(home, total=args.requests, **common)]
    gc.collect()
    gc.freeze()  # the ranks' collectors don't touch these objects, so their pages stay shared
    network = dict(latency_s=1e-3, rate_bits=1e9, lifetime_s=4 * 60 * args.minutes + 7200)
    with Cluster(nodes=nodes, ranks_per_node=ranks_per_node, **network) as cluster:
        soak = Soak(cluster, works, limit_s=args.time_limit, seed=args.seed)
        soak.run(home, 60 * args.minutes, args.every, lambda found: print(line(soak, found), flush=True))
        namespaces = inodes(cluster)
    soak.left = processes_in(namespaces)
    return soak


def line(soak: Soak, x: Incarnation) -> str:
    """One incarnation in words."""
    text = f"{x.number:>3}  {x.began_s:5.0f}-{x.ended_s:<5.0f} s  {x.work:<8} round {x.round}  {x.expected} to {x.last}"
    for fault in soak.faults:
        if fault.incarnation == x.number:
            took = [s.seconds for s in fault.survivors if s.seconds is not None]
            text += f"; {fault.kind} rank {fault.rank}"
            text += f": others ended after {min(took):.1f} to {max(took):.1f} s" if took else ""
            named = sum(accused(s.said) == {fault.rank} for s in fault.survivors)
            text += f", {named} of {len(fault.survivors)} named it" * bool(fault.survivors)
    return text + f"\n{x.failed}" * bool(x.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
