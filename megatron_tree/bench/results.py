"""What every benchmark writes: CSV and JSON after each result, and figures in the end, in one folder.

A figure is made of panels of curves or bars: a small PNG file.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import importlib.util
import io
import itertools
import json
import pathlib
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..files import whole_file
from .measure import CORES

COLOURS = {
    "ring": "tab:red",
    "allreduce": "tab:orange",
    "allgather": "tab:brown",
    "butterfly": "tab:purple",
    "scatter": "tab:olive",
    "two_level": "tab:blue",
    "kv_gather": "tab:orange",
    "pure_tree": "tab:purple",
    "grid": "tab:blue",
    "ulysses": "tab:green",
    "auto": "black",
    "plain": "tab:green",
}


class WrongResult(RuntimeError):
    """A result differs from the truth by more than allowed: no speed is printed."""


def metadata(command: str, **values) -> dict:
    """What the files say about a run: the command, `values`, the machine and torch's version."""
    return {"command": command, **values, "machine": f"{platform.machine()}, {CORES} cores", "torch": torch.__version__}


def progress_bar(total: int, unit: str):
    """A bar of tqdm on standard error, hidden without a terminal; ranks may be forked while it is shown."""
    from tqdm import tqdm  # `bench kernels` runs without it

    tqdm.monitor_interval = 0  # its thread would not survive a fork
    return tqdm(total=total, unit=unit, disable=None, leave=False)


def write_csv(path: pathlib.Path, rows: list) -> None:
    """Named tuples of one type, atomically, without the columns that all of them leave None."""
    columns = [name for name in rows[0]._fields if any(getattr(row, name) is not None for row in rows)]
    with whole_file(path) as part, part.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            values = [getattr(row, name) for name in columns]
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])


class Results:
    """The rows of a run. Each addition replaces results.csv and results.json, so a run that is stopped keeps them."""

    def __init__(self, folder: pathlib.Path, about: dict):
        self.folder, self.rows = folder, []
        self.about = {"date": datetime.date.today().isoformat(), **about, "complete": False}

    def add(self, *rows, **about) -> None:
        """Add named tuples of one type, and what else is known about the run."""
        self.rows += rows
        self.about |= about
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rows:
            write_csv(self.folder / "results.csv", self.rows)
        with whole_file(self.folder / "results.json") as path:
            path.write_text(json.dumps({**self.about, "rows": [row._asdict() for row in self.rows]}, indent=1))

    def finish(self, figures: dict[str, list[list[Panel]]], title: str) -> None:
        """Mark the results as complete, and draw the figures, by file name. Raises: ValueError without rows."""
        if not self.rows:
            raise ValueError("nothing was measured: no contender could take any of the cases")
        self.add(complete=True)
        if importlib.util.find_spec("matplotlib") is None:
            print("no plot: matplotlib is not installed")
            figures = {}
        for name, panels in figures.items():
            try:
                with whole_file(self.folder / name) as path:
                    draw(path, panels, title)
            except Exception as error:  # all else is written
                print(f"no {name}: {type(error).__name__}: {error}")
        print(f"\n{', '.join(['results.csv', 'results.json', *figures])} are in {self.folder}")


class Curve(NamedTuple):
    """Values y over x; bars if x are names. Circles mark `predicted` values, None where there are none."""

    name: str
    x: Sequence
    y: Sequence[float]
    predicted: Sequence[float | None] = ()
    style: dict = {}  # noqa: RUF012  of matplotlib; the colour is that of the name's first word in COLOURS


class Panel(NamedTuple):
    """One coordinate system: labels of its axes, and what it shows."""

    x: str
    y: str
    curves: list[Curve]
    title: str = ""
    yscale: str = "log"


def grouped(rows, key: Callable) -> dict:
    """{key(row): rows with that key}, in the order of first occurrence."""
    groups: dict = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def draw(path: pathlib.Path, panels: list[list[Panel]], title: str) -> None:
    """Lines of panels, with one legend below: a name has the same style in all of them."""
    bars = isinstance(panels[0][0].curves[0].x[0], str)
    size = (4.6 * len(panels[0]), (3.6 if len(panels[0]) > 1 else 5.0) * len(panels))
    with figure(path, len(panels), len(panels[0]), size=size, title=title, legend=True) as axes:
        for ax, panel in zip(axes.flat, itertools.chain(*panels)):
            (_bars if bars else _lines)(ax, panel)
            label(ax, panel.x, panel.y)
            ax.set_title(panel.title, fontsize=9, loc="left")


def _lines(ax, panel: Panel) -> None:
    for curve in panel.curves:
        colour = COLOURS.get(curve.name.partition(",")[0])
        style = {"marker": ".", "color": colour, "linewidth": 2 if curve.name == "auto" else 1.2, **curve.style}
        (line,) = ax.plot(curve.x, curve.y, label=curve.name, **style)
        if points := [(x, y) for x, y in zip(curve.x, curve.predicted) if y]:
            circles = dict(marker="o", mfc="none", mec=line.get_color(), linestyle="none", markersize=8)
            ax.plot(*zip(*points), label="predicted", **circles)
    ticks = sorted({x for curve in panel.curves for x in curve.x})
    ax.set_xscale("log", base=2)
    ax.set_yscale(panel.yscale)
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()


def _bars(ax, panel: Panel) -> None:
    """Groups of bars: a group for each name on the axis, a bar in it for each curve; the smallest at the bottom."""
    smallest = {
        name: min(c.y[c.x.index(name)] for c in panel.curves if name in c.x) for c in panel.curves for name in c.x
    }
    names, height = sorted(smallest, key=smallest.get), 0.8 / len(panel.curves)
    for number, curve in enumerate(panel.curves):
        places = [names.index(x) + number * height for x in curve.x]
        colours = [COLOURS.get(x, "lightgrey") for x in curve.x] if len(panel.curves) == 1 else None
        ax.barh(places, curve.y, height=height, color=colours, label=curve.name)
        if points := [(y, place) for y, place in zip(curve.predicted, places) if y]:
            ax.plot(*zip(*points), marker="o", mfc="none", mec="grey", linestyle="none", label="predicted")
    ax.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
    if max(smallest.values()) > 100 * min(smallest.values()):
        ax.set_xscale("log")


@contextlib.contextmanager
def figure(
    path: pathlib.Path, rows: int, columns: int, *, size: tuple[float, float], title: str, legend: bool = False
) -> Iterator:
    """An array [rows, columns] of axes, written to `path` when the block ends. size: in inches, without the legend."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    below = 0.8 * legend
    whole, axes = plt.subplots(rows, columns, figsize=(size[0], size[1] + below), squeeze=False)
    try:
        yield axes
        whole.suptitle(title, fontsize=8)
        if legend:
            shown = {name: x for ax in axes.flat for x, name in zip(*ax.get_legend_handles_labels())}
            whole.legend(shown.values(), shown.keys(), loc="lower center", ncols=max(3, round(size[0] / 2)), fontsize=8)
        whole.tight_layout(rect=(0, below / (size[1] + below), 1, 1))
        drawn = io.BytesIO()
        whole.savefig(drawn, format="png", dpi=80)
    finally:
        plt.close(whole)
    image = Image.open(drawn).convert("RGB").quantize(128, method=Image.Quantize.MAXCOVERAGE)
    image.save(path, format="png", optimize=True)


def label(ax, x: str, y: str) -> None:
    """Axis labels, grid and small ticks."""
    ax.set_xlabel(x, fontsize=8)
    ax.set_ylabel(y, fontsize=8)
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=8)
