"""Where the planner's choice pays: its speed-up over what others use, by ranks and tokens, for some machines.

Predicted by the cost model, forward and backward of one attention.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from ..files import whole_file
from ..plan import Topology, load_topology
from .figures import figure, grouped
from .results import write_csv
from .simulated import SHAPES, rival_seconds, training

HIDDEN = 1.05  # compute hides communication where a pass takes at most this many times as long as its compute
POWERS = (8, 16, 32, 64, 128, 256, 512, 1024)
RANKS = {"dgx_h100": POWERS, "gb200_nvl72": (8, 16, 36, 72, 144, 288, 576, 1152), "ethernet": POWERS}
"""Machines that are drawn, and how many ranks: whole nodes, from 72 on whole racks."""
TOKENS = tuple(1 << n for n in range(15, 23))
CASES = ("MHA", "GQA 4:1")
RIVALS = ("ring", "Ulysses", "a2a+p2p")


class Point(NamedTuple):
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

    def seconds(self, rival: str) -> float | None:
        """Of one of `RIVALS`."""
        return dict(zip(RIVALS, self[-3:]))[rival]


def run(out: Path, topology: Topology | None) -> None:
    """Write pays.csv and a picture per machine into `out`, and print where compute hides what.

    topology: one machine instead of those in `RANKS`.
    """
    machines = {name: load_topology(name) for name in RANKS} if topology is None else {topology.name: topology}
    rows = [point for machine in machines.values() for point in points(machine)]
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "pays.csv", rows)
    for name, mine in grouped(rows, lambda row: row.topology).items():
        with whole_file(out / f"pays-{name}.png") as path:
            draw(path, mine)
        print(f"{name}: speed-up of the planner's choice over " + ", ".join(RIVALS))
        for case, of_case in grouped(mine, lambda row: row.case).items():
            print(f"  {case:8} {'ranks':>6}  " + "  ".join(f"{_tokens(n):^16}" for n in TOKENS))
            for ranks, line in grouped(of_case, lambda row: row.ranks).items():
                cells = [" ".join(f"{_number(row, rival):>5}" for rival in RIVALS) for row in line]
                print(f"  {'':8} {ranks:6}  " + " |".join(cells))


def points(topology: Topology) -> list[Point]:
    """All shapes, numbers of ranks and lengths on one machine."""
    found = []
    for case in CASES:
        for ranks in RANKS.get(topology.name, POWERS):
            for seq_len in TOKENS:
                plan = training(topology, ranks, SHAPES[case], seq_len)
                both = plan.forward, plan.backward
                rivals = (rival_seconds(plan, rival) for rival in RIVALS)
                compute = sum(next(c for c in t if c.ulysses_size == 1).cost.compute_s for t in plan.candidates)
                time_s, chosen = sum(p.cost.time_s for p in both), "; ".join(map(str, both))
                found.append(Point(topology.name, case, ranks, seq_len, chosen, time_s, compute, *rivals))
    return found


def draw(path: Path, rows: list[Point]) -> None:
    """A field for each shape and rival: speed-ups, and the lines beyond which compute hides communication."""
    title = (
        f"Predicted on {rows[0].topology}: how many times faster the planner's choice is, forward and backward; "
        "32 heads of 128, causal, bf16\nAbove the solid line compute hides the communication of the planner's choice, "
        "above the dotted line that of the other"
    )
    cases = grouped(rows, lambda row: row.case)
    with figure(path, len(cases), len(RIVALS), size=(4.6 * len(RIVALS), 3.6 * len(cases)), title=title) as axes:
        for line, (case, mine) in zip(axes, cases.items()):
            for ax, rival in zip(line, RIVALS):
                _field(ax, mine, rival)
                ax.set_title(f"than {rival}, {case}", fontsize=9, loc="left")


def _field(ax, rows: list[Point], rival: str) -> None:
    from matplotlib.colors import TwoSlopeNorm

    ranks, lengths = (list(dict.fromkeys(row[i] for row in rows)) for i in (2, 3))
    found = {(lengths.index(row.seq_len), ranks.index(row.ranks)): row for row in rows}
    shape = range(len(lengths)), range(len(ranks))
    colours = [[_log(found[y, x], rival) for x in shape[1]] for y in shape[0]]
    ax.imshow(colours, origin="lower", aspect="auto", cmap="PiYG", norm=TwoSlopeNorm(0, -1, 6))
    for (y, x), row in found.items():
        ax.text(x, y, _number(row, rival), ha="center", va="center", fontsize=7)
    for style, name in (("-", "auto"), (":", rival)):
        for y, x in found:
            here, below, left = (_hidden(found.get(at), name) for at in ((y, x), (y - 1, x), (y, x - 1)))
            if {here, below} == {True, False}:
                ax.plot((x - 0.5, x + 0.5), (y - 0.5, y - 0.5), "k" + style, linewidth=1.8)
            if {here, left} == {True, False}:
                ax.plot((x - 0.5, x - 0.5), (y - 0.5, y + 0.5), "k" + style, linewidth=1.8)
    ax.set_xticks(shape[1], ranks)
    ax.set_yticks(shape[0], map(_tokens, lengths))
    ax.set_xlabel("ranks", fontsize=8)
    ax.set_ylabel("tokens", fontsize=8)
    ax.tick_params(labelsize=8)


def _hidden(row: Point | None, name: str) -> bool | None:
    """Whether compute hides the communication of "auto" or a rival; None where there is none."""
    seconds = row and (row.auto_s if name == "auto" else row.seconds(name))
    return seconds and seconds <= HIDDEN * row.compute_s


def _log(row: Point, rival: str) -> float:
    seconds = row.seconds(rival)
    return 0.0 if seconds is None else min(6.0, math.log2(seconds / row.auto_s))


def _number(row: Point, rival: str) -> str:
    seconds = row.seconds(rival)
    if seconds is None:
        return "-"
    ratio = seconds / row.auto_s
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def _tokens(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k"
