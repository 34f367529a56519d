"""Where the planner's choice pays: its speed-up over what others use, by ranks and tokens, for some machines.

Predicted by the cost model, forward and backward of one attention.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import NamedTuple

from ..files import whole_file
from ..plan import Topology, load_topology
from .predictions import SHAPES, rival_seconds, tokens_text, training
from .results import figure, grouped, label, write_csv

HIDDEN = 1.05  # compute hides communication where a pass takes at most this many times as long as its compute
POWERS = (8, 16, 32, 64, 128, 256, 512, 1024)
RANKS = {"dgx_h100": POWERS, "gb200_nvl72": (8, 16, 36, 72, 144, 288, 576, 1152), "ethernet": POWERS}
"""Machines that are drawn, and how many ranks: whole nodes, from 72 on whole racks."""
TOKENS = tuple(1 << n for n in range(15, 23))
CASES = ("MHA", "GQA 4:1")
RIVALS = ("ring", "Ulysses", "a2a+p2p")


class SpeedUp(NamedTuple):
    """One machine, shape, number of ranks and length; seconds of both passes together."""

    topology: str
    case: str
    ranks: int
    seq_len: int
    chosen: str
    """The plan of forward and backward."""
    auto_s: float
    compute_s: float
    ring_s: float
    ulysses_s: float | None
    """None: there are more ranks than query heads."""
    a2a_p2p_s: float | None
    """None: the ranks are on one node."""

    def seconds(self, name: str) -> float | None:
        """Of "auto", or one of `RIVALS`."""
        return dict(zip(("auto", *RIVALS), (self.auto_s, *self[-3:])))[name]

    def speed_up(self, rival: str) -> float | None:
        """Of the planner's choice over a rival."""
        return self.seconds(rival) and self.seconds(rival) / self.auto_s

    def hidden(self, name: str) -> float:
        """1.0 if compute hides the communication of "auto" or a rival, nan where there is none."""
        seconds = self.seconds(name)
        return math.nan if seconds is None else float(seconds <= HIDDEN * self.compute_s)


def run(out: Path, topology: Topology | None) -> None:
    """Write pays.csv and a picture per machine into `out`, and print the speed-ups.

    topology: one machine instead of those in `RANKS`.
    """
    machines = {name: load_topology(name) for name in RANKS} if topology is None else {topology.name: topology}
    rows = [point for machine in machines.values() for point in points(machine)]
    write_csv(out / "pays.csv", rows)
    for name, points_of_machine in grouped(rows, lambda row: row.topology).items():
        with whole_file(out / f"pays-{name}.png") as path:
            _draw(path, points_of_machine)
        print(f"{name}: speed-up of the planner's choice over " + ", ".join(RIVALS))
        for case, of_case in grouped(points_of_machine, lambda row: row.case).items():
            print(f"  {case:8} {'ranks':>6}  " + "  ".join(f"{tokens_text(n):^16}" for n in TOKENS))
            for ranks, line in grouped(of_case, lambda row: row.ranks).items():
                cells = [" ".join(f"{_number(row.speed_up(rival)):>5}" for rival in RIVALS) for row in line]
                print(f"  {'':8} {ranks:6}  " + " |".join(cells))


def points(topology: Topology) -> list[SpeedUp]:
    """All shapes, numbers of ranks and lengths on one machine."""
    rows = []
    for case, ranks, seq_len in itertools.product(CASES, RANKS.get(topology.name, POWERS), TOKENS):
        plan = training(topology, ranks, SHAPES[case], seq_len)
        both = plan.forward, plan.backward
        compute_s = sum(next(c for c in t if c.ulysses_size == 1).cost.compute_s for t in plan.candidates)
        time_s, chosen = sum(p.cost.time_s for p in both), "; ".join(map(str, both))
        rivals = (rival_seconds(plan, rival) for rival in RIVALS)
        rows.append(SpeedUp(topology.name, case, ranks, seq_len, chosen, time_s, compute_s, *rivals))
    return rows


def _draw(path: Path, rows: list[SpeedUp]) -> None:
    """A map for each shape and rival: speed-ups, and the lines beyond which compute hides communication."""
    title = (
        f"Predicted on {rows[0].topology}: how many times faster the planner's choice is, forward and backward; "
        "32 heads of 128, causal, bf16\nAbove the solid line compute hides the communication of the planner's choice, "
        "above the dotted line that of the other"
    )
    cases = grouped(rows, lambda row: row.case)
    with figure(path, len(cases), len(RIVALS), size=(4.6 * len(RIVALS), 3.6 * len(cases)), title=title) as axes:
        for ax, (case, rival) in zip(axes.flat, itertools.product(cases, RIVALS)):
            lines = list(grouped(cases[case], lambda row: row.seq_len).values())
            values = [[math.log2(row.speed_up(rival) or 1.0) for row in line] for line in lines]
            ax.imshow(values, origin="lower", aspect="auto", cmap="PiYG", vmin=-6, vmax=6, alpha=0.75)
            for y, x in itertools.product(range(len(lines)), range(len(lines[0]))):
                ax.text(x, y, _number(lines[y][x].speed_up(rival)), ha="center", va="center", fontsize=7)
            ax.set_xticks(range(len(lines[0])), [row.ranks for row in lines[0]])
            ax.set_yticks(range(len(lines)), [tokens_text(line[0].seq_len) for line in lines])
            label(ax, "ranks", "tokens")
            ax.grid(False)
            ax.set_title(f"than {rival}, {case}", fontsize=9, loc="left")
            for style, name in (("-", "auto"), (":", rival)):
                hidden = [[row.hidden(name) for row in line] for line in lines]
                if {0.0, 1.0} <= {x for line in hidden for x in line}:
                    ax.contour(hidden, levels=[0.5], colors="k", linestyles=style, linewidths=1.8)


def _number(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"
