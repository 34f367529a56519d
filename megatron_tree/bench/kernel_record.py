"""The files of `bench kernels`, whole after each result: results.json and results.csv, and in the end a plot."""

from __future__ import annotations

import datetime
import importlib.util
import json
import pathlib

from ..files import whole_file
from ..kernels import fastest
from .figures import Curve, Panel, draw, grouped
from .kernel_cases import Timing
from .results import write_csv
from .supervised import Outcome

PLOTTED = ("fwd", "bwd", "decode")


def fastest_backends(rows: list[Timing]) -> dict[str, str]:
    """{head_dim: our backend with the least time of forward and backward}: `kernels.fastest`'s table of a GPU.

    By the first case of a head_dim whose forward and backward were both timed.
    """
    found: dict[str, str] = {}
    times = {(row.case, row.name): row.ms for row in rows if row.name.startswith("ours, ")}
    for case in dict.fromkeys(row.case for row in rows if row.kind == "fwd"):
        backward, width = case.replace("fwd", "bwd"), case.rpartition(" d")[2]
        names = [name for of, name in times if of == case and (backward, name) in times]
        if names:
            best = min(names, key=lambda name: times[case, name] + times[backward, name])
            found.setdefault(width, best.removeprefix("ours, "))
    return found


class Record:
    """What was found so far; every addition is written to `folder` at once, each file by renaming a whole one."""

    def __init__(self, folder: pathlib.Path, about: dict):
        self.folder, self.about = folder, {"date": datetime.date.today().isoformat(), **about}
        self.rows: list[Timing] = []
        self.outcomes: list[Outcome] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._write()

    def row(self, row: Timing) -> None:
        """A result."""
        self.rows.append(row)
        write_csv(self.folder / "results.csv", self.rows)
        self._write()

    def ended(self, outcome: Outcome) -> None:
        """A case has ended."""
        self.outcomes.append(outcome)
        self._write()

    def compiled(self, said: str) -> None:
        """How far compiling ahead came."""
        print(said, flush=True)
        self.about["compiled"] = said
        self._write()

    def _write(self) -> None:
        content = {
            **self.about,
            "rows": [r._asdict() for r in self.rows],
            "cases": [o._asdict() for o in self.outcomes],
        }
        with whole_file(self.folder / "results.json") as path:
            path.write_text(json.dumps(content, indent=1))

    def finish(self) -> None:
        """The table of the fastest backends on this GPU, the plot, and where everything is."""
        if "cuda" in self.about and (backends := fastest_backends(self.rows)):
            with whole_file(self.folder / fastest.TABLE.name) as path:
                path.write_text(json.dumps(fastest.table() | {self.about["device"]: backends}, indent=1) + "\n")
            print(f"for backend='auto': copy {self.folder / fastest.TABLE.name} over {fastest.TABLE}")
        shown = [row for row in self.rows if row.kind in PLOTTED]
        if importlib.util.find_spec("matplotlib") is None:
            print("no plot: matplotlib is not installed")
        elif shown:
            panels = [[_panel(unit, rows) for unit, rows in grouped(shown, lambda row: row.unit).items()]]
            title = ", ".join(f"{name} {value}" for name, value in self.about.items())
            try:
                with whole_file(self.folder / "results.png") as path:
                    draw(path, panels=panels, title=title)
            except Exception as error:  # all else is written
                print(f"no plot: {type(error).__name__}: {error}")
        print(f"\nresults.csv, results.json and the plot are in {self.folder}")


def _panel(unit: str, rows: list[Timing]) -> Panel:
    by_name = grouped(rows, lambda row: row.name)
    return Panel(unit, "", [Curve(name, *zip(*((r.case, r.rate) for r in mine))) for name, mine in by_name.items()])
