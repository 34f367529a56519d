"""What every benchmark writes: CSV and JSON after each result, and figures in the end, in one folder.

A figure is made of panels of curves or bars: a small PNG file.
"""

from __future__ import annotations

import csv
import datetime
import importlib.util
import itertools
import json
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..files import whole_file
from .measure import CORES


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


class Panel(NamedTuple):
    """One coordinate system: labels of its axes, and what it shows."""

    x: str
    y: str
    curves: list[Curve]
    title: str = ""


def grouped(rows, key: Callable) -> dict:
    """{key(row): rows with that key}, in the order of first occurrence."""
    groups: dict = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def draw(path: pathlib.Path, panels: list[list[Panel]], title: str) -> None:
    """Write lines of panels as PNG, with one legend below: a name has the same colour in all of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = dict.fromkeys(curve.name for panel in itertools.chain(*panels) for curve in panel.curves)
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    columns, bars = len(panels[0]), isinstance(panels[0][0].curves[0].x[0], str)
    size = (max(6.0, 4.6 * columns), 3.6 * len(panels) + 0.8)
    figure, axes = plt.subplots(len(panels), columns, figsize=size, squeeze=False)
    try:
        for ax, panel in zip(axes.flat, itertools.chain(*panels)):
            (_bars if bars else _lines)(ax, panel, colours)
            ax.set_xlabel(panel.x, fontsize=8)
            ax.set_ylabel(panel.y, fontsize=8)
            ax.set_title(panel.title, fontsize=9, loc="left")
            ax.grid(alpha=0.3)
            ax.set_axisbelow(True)
            ax.tick_params(labelsize=8)
        figure.suptitle(title, fontsize=8)
        shown = {name: x for ax in axes.flat for x, name in zip(*ax.get_legend_handles_labels())}
        figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=3 * columns, fontsize=8)
        figure.tight_layout(rect=(0, 0.8 / size[1], 1, 1))
        figure.savefig(path, format="png", dpi=80)
    finally:
        plt.close(figure)


def _lines(ax, panel: Panel, colours: dict[str, str]) -> None:
    for curve in panel.curves:
        ax.plot(curve.x, curve.y, marker=".", color=colours[curve.name], label=curve.name)
        _predicted(ax, curve.x, curve.predicted)
    ticks = sorted({x for curve in panel.curves for x in curve.x})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()


def _bars(ax, panel: Panel, colours: dict[str, str]) -> None:
    """A group of bars for each name on the axis, a bar in it for each curve; the first at the top."""
    names = list(dict.fromkeys(x for curve in panel.curves for x in curve.x))
    height = 0.8 / len(panel.curves)
    for number, curve in enumerate(panel.curves):
        places = [names.index(x) + (number + 0.5) * height for x in curve.x]
        ax.barh(places, curve.y, height=height, color=colours[curve.name], label=curve.name)
        _predicted(ax, curve.predicted, places)
    ax.set_yticks([place + 0.4 for place in range(len(names))], names)
    ax.invert_yaxis()
    values = [y for curve in panel.curves for y in curve.y]
    if max(values) > 100 * min(values):
        ax.set_xscale("log")


def _predicted(ax, x: Sequence, y: Sequence) -> None:
    """Circles where both are known."""
    if points := [point for point in zip(x, y) if all(point)]:
        ax.plot(*zip(*points), marker="o", mfc="none", mec="grey", linestyle="none", label="predicted")
