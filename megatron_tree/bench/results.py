"""What every benchmark ends with: a table on standard output, and CSV, JSON and PNG files in a folder."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Generator

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


@contextlib.contextmanager
def results_kept(folder: pathlib.Path, about: dict, plots: Callable[[list], Plots]) -> Generator[list, None, None]:
    """A list for the rows, which are written to `folder` when the block ends, or at Ctrl-C.

    about: metadata for all rows. Raises: ValueError without rows.
    """
    rows: list = []
    try:
        yield rows
    except KeyboardInterrupt as error:
        if rows:
            print(f"\ninterrupted ({type(error).__name__}): keeping the results so far", file=sys.stderr)
            _write(folder, rows, {**about, "ended_by": f"{type(error).__name__}: {error}"}, plots(rows))
        raise
    if not rows:
        raise ValueError("nothing was measured: no contender could take any of the cases")
    _write(folder, rows, about, plots(rows))


def _write(folder: pathlib.Path, rows: list, about: dict, plots: Plots) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"date": datetime.date.today().isoformat(), **about}
    write_csv(folder / "results.csv", rows)
    with whole_file(folder / "results.json") as path:
        path.write_text(json.dumps({**about, "rows": [r._asdict() for r in rows]}, indent=1))
    for name, draw in plots.items():
        with whole_file(folder / name) as path:
            draw(path)
    print(f"\nresults.csv, results.json and {', '.join(plots)} are in {folder}")
