"""What benchmarks write and print: rows as CSV and JSON after each result, a table of each case, figures in the end.

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
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...core.files import whole_file, writing
from .timing import CORES, RankTimes

PASSES = ("batch", "forward", "backward", "optimizer")


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
        with writing(self.folder):
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


class Measurement(NamedTuple):
    """One pass of one contender in one case, or a limit: a line of results.csv. None: does not apply."""

    machines: str
    ranks: int
    seq_len: int  # of the whole sequence, or of the prompt
    model: str | None = None
    new_tokens: int | None = None
    cache: str | None = None
    num_heads: int | None = None
    num_heads_kv: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    compute: str | None = None
    dilate: float | None = None
    schedule: str = ""
    part: str = ""  # "decode", "token"; "forward", "backward", "total"; "limit": a lower bound or an ideal ring
    plan: str | None = None
    steps: int | None = None
    ms: float | None = None  # median over steps, or over tokens after the first, of the slowest rank's time
    p10_ms: float | None = None
    p90_ms: float | None = None
    ratio: float | None = None  # ms divided by that of `auto`, or of the first schedule
    predicted_ms: float | None = None
    prefill_ms: float | None = None
    first_token_ms: float | None = None  # the prefill, which all schedules share, and one step
    cpu_ms: float | None = None  # CPU time of all ranks and threads in a step, median; not with modelled compute
    tokens_per_s: float | None = None
    sent_bytes: int | None = None  # payload that a rank sends in a step, mean over the ranks
    predicted_sent_bytes: int | None = None
    node_bytes: int | None = None  # what a node's interface sent in a step, headers included, mean over the nodes
    predicted_node_bytes: int | None = None
    memory_bytes: int | None = None  # peak above what was resident before the step, maximum over the ranks
    predicted_memory_bytes: int | None = None
    held_bytes: int | None = None  # what a rank holds before the step: its shard or its cache
    error: float | None = None  # the largest on any rank, as a fraction of the allowed error, or of the largest logit


def measurements(
    base: Measurement, ranks: list[RankTimes], predicted: dict, ranks_per_node: int, dilate: float = 1.0
) -> list[Measurement]:
    """Rows of one schedule from all ranks: one for each pass and, if there are several, their total.

    base: what all of them share. predicted: the plan of each pass, or empty.
    """
    ms, parts, rows = 1e3 / dilate, {name: [name] for name in ranks[0].seconds}, []
    if len(parts) > 1:
        parts["total"] = list(ranks[0].seconds)
    for part, passes in parts.items():
        steps = [[sum(times) for times in zip(*(rank.seconds[name] for name in passes))] for rank in ranks]
        slowest = sorted(ms * max(times) for times in zip(*steps))
        values = dict(part=part, steps=len(slowest), ms=statistics.median(slowest))
        values["p10_ms"], values["p90_ms"] = (slowest[round((len(slowest) - 1) * x)] for x in (0.1, 0.9))
        values["sent_bytes"] = round(statistics.mean(sum(rank.sent[name] for name in passes) for rank in ranks))
        costs = [predicted[name].cost for name in passes] if predicted else []
        if costs:
            values["plan"] = " / ".join(dict.fromkeys(str(predicted[name]) for name in passes))
            values["predicted_ms"] = ms * sum(cost.time_s for cost in costs)
            values["predicted_sent_bytes"] = round(sum(cost.bytes for cost in costs))
        rows.append(base._replace(**values))
    whole = dict(memory_bytes=max((rank.memory for rank in ranks if rank.memory is not None), default=None))
    if ranks[0].cpu is not None:
        whole["cpu_ms"] = ms * statistics.median(map(sum, zip(*(rank.cpu for rank in ranks))))
    if ranks[0].network is not None:
        whole["node_bytes"] = round(statistics.mean(rank.network for rank in ranks[::ranks_per_node]))
    if costs:  # of all passes
        whole["predicted_memory_bytes"] = max(cost.peak_bytes for cost in costs)
        if ranks[0].network is not None:
            node = ranks_per_node * sum(cost.bytes_per_level[-1] for cost in costs)
            whole["predicted_node_bytes"] = round(node)
    return [*rows[:-1], rows[-1]._replace(**whole)]


def with_ratios(rows: list[Measurement]) -> list[Measurement]:
    """The rows of one case, with each time divided by that of `auto`, or else of the first schedule."""
    first = next(r.schedule for r in rows if r.schedule != "plain")
    name = "auto" if any(r.schedule == "auto" for r in rows) else first
    base = {r.part: r.ms for r in rows if r.schedule == name}
    whole = list(base.values())[-1]
    return [r if r.ratio else r._replace(ratio=r.ms / base.get(r.part, whole)) for r in rows]


COLUMNS = (
    ("x auto", "ratio", 1),
    ("first ms", "first_token_ms", 1),
    ("median ms", "ms", 1),
    ("p10", "p10_ms", 1),
    ("p90", "p90_ms", 1),
    ("predicted", "predicted_ms", 1),
    ("CPU ms", "cpu_ms", 1),
    ("tokens/s", "tokens_per_s", 1),
    ("sent kB", "sent_bytes", 1e-3),
    ("predicted", "predicted_sent_bytes", 1e-3),
    ("node kB", "node_bytes", 1e-3),
    ("predicted", "predicted_node_bytes", 1e-3),
    ("holds MB", "held_bytes", 1e-6),
    ("peak MB", "memory_bytes", 1e-6),
    ("predicted", "predicted_memory_bytes", 1e-6),
)
"""(heading, field, factor); fields that are None in all rows are left out."""


def table_of(label: str, checked: str, rows: list[Measurement]) -> str:
    """The table of one case. checked: says how the results were verified."""
    names = [r.schedule + f" {r.part}" * (r.part in PASSES) for r in rows]
    width = max(map(len, names))
    columns = [column for column in COLUMNS if any(getattr(r, column[1]) is not None for r in rows)]
    lines = [f"\n{label}", f"  {checked}", " " * (width + 2) + "".join(f"{heading:>10}" for heading, *_ in columns)]
    for name, row in zip(names, rows):
        values = [(getattr(row, field), factor) for _, field, factor in columns]
        cells = "".join(" " * 10 if x is None else f"{float(f'{x * factor:.3g}'):>10g}" for x, factor in values)
        lines.append(f"  {name:<{width}}{cells}" + f"  {row.plan}" * (row.schedule == "auto" and row.plan is not None))
    return "\n".join(lines)


METRICS = (
    ("time of a step (ms)", "ms", 1),
    ("payload sent by a rank (MB)", "sent_bytes", 1e-6),
    ("memory of a rank: shard and buffers (MB)", "memory_bytes", 1e-6),
)
"""(label, field, factor) of the columns of a figure."""


def plots(rows: list[Measurement]) -> dict[str, list[list[Panel]]]:
    """Figures over sequence length and over ranks, where these vary; else bars of each case."""
    rows = [r for r in rows if r.part not in PASSES]
    what = lambda r: r.model or f"{r.num_heads}/{r.num_heads_kv} heads x {r.head_dim}"  # noqa: E731
    drawn = {}
    for name, axis, x, heading in (
        ("seq-len.png", "tokens, thousands (1024)", lambda r: r.seq_len / 1024,
         lambda r: f"{r.machines} ranks, {what(r)}"),
        ("ranks.png", "ranks", lambda r: r.ranks, lambda r: f"{_network(r)}, {r.seq_len} tokens, {what(r)}"),
    ):  # fmt: skip
        groups = {k: g for k, g in grouped(rows, heading).items() if len(set(map(x, g))) > 1}
        if groups:
            drawn[name] = [_line(heading, of, axis, x) for heading, of in groups.items()]
    cases = grouped(rows, lambda r: f"{r.machines} ranks, {r.seq_len} tokens, {what(r)}")
    return drawn or {"results.png": [_line(heading, of) for heading, of in cases.items()]}


def _line(heading: str, rows: list[Measurement], axis: str = "", x: Callable | None = None) -> list[Panel]:
    """A panel for each metric. x: row -> its place on the axis; None: bars of the schedules."""
    line = []
    for label, field, factor in METRICS:
        points = [(r, _metric(r, field, factor), _metric(r, f"predicted_{field}", factor)) for r in rows]
        points = [point for point in points if point[1]]
        if not points:  # others don't say what they send
            continue
        title = heading * (not line)
        if x:
            by_schedule = grouped(points, lambda point: point[0].schedule)
            curves = [Curve(name, *zip(*sorted((x(r), y, p) for r, y, p in of))) for name, of in by_schedule.items()]
            line.append(Panel(axis, label, curves, title))
        else:
            bars = Curve("measured", *zip(*((r.schedule, y, p) for r, y, p in points)))
            line.append(Panel(label, "", [bars], title))
    return line


def _metric(r: Measurement, field: str, factor: float) -> float | None:
    value, held = getattr(r, field), (r.held_bytes or 0) if "memory" in field else 0
    return None if value is None else factor * (value + held)


def _network(r: Measurement) -> str:
    if "local" in r.machines:
        return "loopback"
    return "flat network" if r.machines.endswith("x1") else "nodes of several ranks"
