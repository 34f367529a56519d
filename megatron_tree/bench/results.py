"""What every benchmark ends with: a table on standard output, and CSV, JSON and PNG files in a folder."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable, Generator, Sequence

import torch

from ..files import whole_file
from ..units import format_bytes
from .ranks import CORES

Plots = dict[str, Callable[[pathlib.Path], None]]
"""By file name, functions that write a PNG to a path."""


def metadata(command: str, **values) -> dict:
    """What the files say about a run: the command, `values`, the machine and torch's version."""
    return {"command": command, **values, "machine": f"{platform.machine()}, {CORES} cores", "torch": torch.__version__}


class WrongResult(RuntimeError):
    """A result differs from the truth by more than allowed: no speed is printed."""


def write_results(folder: pathlib.Path, rows: list, about: dict, plots: Plots) -> None:
    """Write results.csv, results.json and the plots into `folder`, each file atomically.

    rows: named tuples of one type. about: metadata for all rows. Raises: ValueError without rows.
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
    for name, draw in plots.items():
        with whole_file(folder / name) as path:
            draw(path)
    print(f"\nresults.csv, results.json and {', '.join(plots)} are in {folder}")


@contextlib.contextmanager
def results_kept(
    folder: pathlib.Path, about: dict, plots: Callable[[list], Plots], *, keep: type[BaseException] = KeyboardInterrupt
) -> Generator[list, None, None]:
    """A list for the rows, which `write_results` gets when the block ends, or when it raises `keep`."""
    rows: list = []
    try:
        yield rows
    except keep as error:
        if rows:
            print(f"\ninterrupted ({type(error).__name__}): keeping the results so far", file=sys.stderr)
            write_results(folder, rows, {**about, "ended_by": f"{type(error).__name__}: {error}"}, plots(rows))
        raise
    write_results(folder, rows, about, plots(rows))


def percentiles(values: list[float]) -> dict[int, float]:
    """{10: ..., 50: median, 90: ...} of some values."""
    ordered, last = sorted(values), len(values) - 1
    return {10: ordered[round(last * 0.1)], 50: statistics.median(ordered), 90: ordered[round(last * 0.9)]}


Column = tuple[str, int, Callable]
"""(heading, width, row -> text, number or None)."""


def table(names: list[str], rows: list, columns: Sequence[Column]) -> list[str]:
    """Lines of a table, headings first."""
    width = max(map(len, names))
    lines = [" ".join(["  " + " " * width, *(f"{heading:>{w}}" for heading, w, _ in columns)])]
    for name, row in zip(names, rows):
        lines.append(" ".join([f"  {name:<{width}}", *(f"{_cell(value(row)):>{w}}" for _, w, value in columns)]))
    return lines


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def num_bytes(value: float | None) -> str | None:
    """Bytes with a unit; None for None."""
    return None if value is None else format_bytes(value)
