"""Timing and the files a benchmark writes: CSV, JSON and a plot."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

import torch

from ..files import whole_file


class WrongResult(RuntimeError):
    """A result is further from the truth than the rule allows: no speed is printed."""


class Row(NamedTuple):
    """One measurement: the median time and the rate it means."""

    case: str
    kind: str
    name: str
    ms: float
    rate: float
    unit: str


def clock(call: Callable[[], object], device: torch.device, *, seconds: float = 0.5) -> float:
    """Median time of one call in seconds, after a warm-up; on a GPU with cold L2, by its own events."""
    call()
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=100, rep=int(seconds * 1000), return_mode="median") / 1e3
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def write_results(folder: pathlib.Path, rows: list, about: dict, *, plots: dict | None = None) -> None:
    """Write results.csv, results.json and the plots into `folder`; each file appears whole or not at all.

    Args:
        rows: named tuples of one kind.
        about: what holds for all rows.
        plots: by file name, functions that write a PNG to a path; default results.png, bars of the rows' rates.
    """
    if not rows:
        raise ValueError("nothing was measured: no contender could take any of the cases")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"date": datetime.date.today().isoformat(), **about}
    with whole_file(folder / "results.csv") as path, path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0]._fields)
        writer.writerows(rows)
    with whole_file(folder / "results.json") as path:
        path.write_text(json.dumps({**about, "rows": [r._asdict() for r in rows]}, indent=1))
    if plots is None:
        shown = [r for r in rows if r.kind != "race"] or rows
        plots = {"results.png": lambda path: _plot(path, shown, about)}
    for name, draw in plots.items():
        with whole_file(folder / name) as path:
            draw(path)
    print(f"\nresults.csv, results.json and {', '.join(plots)} are in {folder}")


@contextlib.contextmanager
def results_kept(folder: pathlib.Path, about: dict, plots: Callable[[list], dict]) -> Generator[list, None, None]:
    """A list to put rows into, which `write_results` gets at the end, or when Ctrl-C ends a long run before.

    plots: makes the plots of `write_results` of these rows.
    """
    rows: list = []
    try:
        yield rows
    except KeyboardInterrupt:
        if rows:
            print("\ninterrupted: the results of the cases that are done are kept", file=sys.stderr)
            write_results(folder, rows, about, plots=plots(rows))
        raise
    write_results(folder, rows, about, plots=plots(rows))


def _plot(path: pathlib.Path, rows: list[Row], about: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    units = sorted({r.unit for r in rows}, reverse=True)
    figure, axes = plt.subplots(1, len(units), figsize=(8 * len(units), 5), squeeze=False)
    for ax, unit in zip(axes[0], units):
        mine = [r for r in rows if r.unit == unit]
        cases, names = list(dict.fromkeys(r.case for r in mine)), list(dict.fromkeys(r.name for r in mine))
        for i, name in enumerate(names):
            values = {r.case: r.rate for r in mine if r.name == name}
            places = [c + i / (len(names) + 1) for c in range(len(cases))]
            ax.bar(places, [values.get(c, 0) for c in cases], width=1 / (len(names) + 1), label=name)
        ax.set_xticks(range(len(cases)), cases, rotation=20, ha="right", fontsize=7)
        ax.set_ylabel(unit)
        ax.legend(fontsize=7)
    figure.suptitle(", ".join(f"{k} {v}" for k, v in about.items()))
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
