"""Train one model with every context-parallel schedule and from several seeds, and compare the losses.

Each run is megatron-tree train with configs/train/quickstart.yaml: one run per seed on one rank (cp = 1, Megatron's own
attention), and from the first seed one run each of tree attention, the ring and the KV gather on --ranks ranks. The
schedules must differ from cp = 1 by less than the seeds differ. Tree attention runs on the squarest grid, because the
planner might choose a KV gather. Finished runs are not repeated: an interrupted command continues.

Writes DOCS/images/convergence.png and DOCS/convergence.json; exits with 1 if a schedule is not within the noise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SCHEDULES = {"tree attention": "tree --grid {grid}", "ring": "p2p", "KV gather": "all_gather"}
FINAL_STEPS = 10
EXAMPLES = """\
examples (on a machine without an accelerator put DS_ACCELERATOR=cpu in front):
  python launch/convergence.py
  python launch/convergence.py --iters 20 --ranks 2 --docs /tmp/docs --work /tmp/runs     a quick look
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python launch/convergence.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--iters", type=int, default=300, help="steps of every run (default: 300)")
    add("--ranks", type=int, default=4, help="context-parallel ranks (default: 4)")
    add("--seeds", type=int, nargs="+", default=[1234, 1, 2], help="the first is shared by all schedules")
    add("--docs", type=Path, default=REPO / "docs", metavar="DIR", help="for the results (default: docs)")
    add("--work", type=Path, default=REPO / "runs" / "convergence", metavar="DIR", help="for the runs")
    add("--option", action="append", default=[], metavar="TEXT", help="more for train: --option='--lr 1e-3'")
    return parser


def plan(args: argparse.Namespace) -> dict[str, tuple[int, str]]:
    """{label: (ranks, options of train)} of every run."""
    runs = {f"cp = 1, seed {seed}": (1, f"--context-parallel-size 1 --seed {seed}") for seed in args.seeds}
    rows = max(n for n in range(1, math.isqrt(args.ranks) + 1) if args.ranks % n == 0)
    for name, schedule in SCHEDULES.items():
        schedule = schedule.format(grid=f"{args.ranks // rows}x{rows}")
        options = f"--context-parallel-size {args.ranks} --cp-comm-type {schedule} --seed {args.seeds[0]}"
        runs[f"cp = {args.ranks}, {name}"] = (args.ranks, options)
    return runs


def train(label: str, ranks: int, options: str, args: argparse.Namespace) -> list[float]:
    """Losses of one run, step by step. It is done unless its log is complete.

    Raises: subprocess.CalledProcessError if it fails.
    """
    folder = args.work / "".join(c if c.isalnum() else "-" for c in label)
    result = folder / "losses.json"
    command = f"--config configs/train/quickstart.yaml {options} --train-iters {args.iters} {' '.join(args.option)}"
    if result.is_file() and (kept := json.loads(result.read_text()))["command"] == command:
        return kept["losses"]
    files = ["--output-dir", str(folder), "--save", str(folder / "checkpoints"), "--keep-checkpoints", "1"]
    start = ["bash", str(REPO / "launch" / "deepspeed_local.sh"), "-n", str(ranks), "train"]
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    subprocess.run([*start, *command.split(), *files], cwd=REPO, env=environment, check=True)
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "event" not in record]
    result.write_text(json.dumps({"command": command, "losses": losses}))
    return losses


def compare(curves: dict[str, list[float]], seeds: list[int]) -> dict:
    """Final losses (mean of the last steps), the noise between seeds, and how far each run is from cp = 1.

    Returns: {"final_loss": {label: loss}, "noise": spread of the seeds' final losses (highest less lowest),
        "difference": {label of cp > 1: how far its final loss is from that of the first seed at cp = 1},
        "within_noise": whether all differences are at most the noise}.
    """
    final = {label: statistics.fmean(losses[-FINAL_STEPS:]) for label, losses in curves.items()}
    alone = [final[f"cp = 1, seed {seed}"] for seed in seeds]
    differences = {label: abs(loss - alone[0]) for label, loss in final.items() if not label.startswith("cp = 1,")}
    noise = max(alone) - min(alone)
    return {
        "final_loss": final,
        "noise": noise,
        "difference": differences,
        "within_noise": all(difference <= noise for difference in differences.values()),
    }


def draw(curves: dict[str, list[float]], verdict: dict, picture: Path) -> None:
    """All curves, and below them how far the context-parallel ones are from cp = 1 with the same seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, figsize=(9, 7), sharex=True, layout="constrained", gridspec_kw={"height_ratios": [2, 1]}
    )
    first = next(iter(curves.values()))
    steps = range(1, len(first) + 1)
    colours = iter(("tab:blue", "tab:orange", "tab:green"))
    for number, (label, losses) in enumerate(curves.items()):
        alone = label.startswith("cp = 1,")
        style = {"color": "black" if number == 0 else "silver", "linewidth": 2.5 if number == 0 else 1.0}
        if not alone:
            style = {"color": next(colours), "linestyle": "--", "linewidth": 1.2}
            gaps = [max(abs(a - b) / b, 1e-9) for a, b in zip(losses, first, strict=True)]
            below.semilogy(steps, gaps, color=style["color"], linewidth=1.0, label=label)
        above.plot(steps, losses, label=f"{label}: {verdict['final_loss'][label]:.4f}", **style)
    above.set(ylabel="loss, nats per byte", title=f"last {FINAL_STEPS} steps in the legend; noise of the seeds "
              f"{verdict['noise']:.4f}")  # fmt: skip
    below.set(xlabel="step", ylabel="relative difference\nto cp = 1, same seed")
    above.legend()
    below.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    from megatron_tree.launching import explain_missing

    with explain_missing("convergence.py"):
        import matplotlib  # noqa: F401  for the plot, after hours of training
    runs = plan(args)
    curves = {}
    for number, (label, (ranks, options)) in enumerate(runs.items(), 1):
        print(f"== {number}/{len(runs)}: {label}", flush=True)
        try:
            curves[label] = train(label, ranks, options, args)
        except subprocess.CalledProcessError as error:
            print(f"convergence.py: the run '{label}' failed: see its output above", file=sys.stderr)
            return error.returncode
    verdict = compare(curves, args.seeds)
    rounded = {label: [round(loss, 6) for loss in losses] for label, losses in curves.items()}
    args.docs.mkdir(parents=True, exist_ok=True)
    record = {**verdict, "iters": args.iters, "seeds": args.seeds, "losses": rounded}
    (args.docs / "convergence.json").write_text(json.dumps(record) + "\n")
    draw(curves, verdict, args.docs / "images" / "convergence.png")
    for label, loss in verdict["final_loss"].items():
        print(f"{label:24} {loss:.4f}")
    print(f"noise between seeds {verdict['noise']:.4f}; largest difference of a schedule "
          f"{max(verdict['difference'].values()):.6f}")  # fmt: skip
    return 0 if verdict["within_noise"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
