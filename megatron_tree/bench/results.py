"""What every benchmark writes: CSV and JSON after each result, and plots in the end, in one folder."""

from __future__ import annotations

import csv
import datetime
import importlib.util
import json
import pathlib
import platform
from collections.abc import Callable

import torch

from ..files import whole_file
from .ranks import CORES

Plots = dict[str, Callable[[pathlib.Path], None]]
"""By file name, functions that write a PNG to a path."""


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

    def finish(self, plots: Plots) -> None:
        """Mark the results as complete, and draw the plots. Raises: ValueError without rows."""
        if not self.rows:
            raise ValueError("nothing was measured: no contender could take any of the cases")
        self.add(complete=True)
        if importlib.util.find_spec("matplotlib") is None:
            print("no plot: matplotlib is not installed")
            plots = {}
        for name, draw in plots.items():
            try:
                with whole_file(self.folder / name) as path:
                    draw(path)
            except Exception as error:  # all else is written
                print(f"no {name}: {type(error).__name__}: {error}")
        print(f"\n{', '.join(['results.csv', 'results.json', *plots])} are in {self.folder}")
