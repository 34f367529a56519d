"""Figures of the benchmarks: small PNG files."""

from __future__ import annotations

import contextlib
import io
import itertools
import pathlib
from collections.abc import Callable, Iterator

COLOURS = {
    "ring": "tab:red",
    "allreduce": "tab:orange",
    "allgather": "tab:brown",
    "butterfly": "tab:purple",
    "scatter": "tab:olive",
    "two_level": "tab:blue",
    "kv_gather": "tab:orange",
    "pure_tree": "tab:purple",
    "auto": "black",
    "plain": "tab:green",
}
AXES = {"ranks": "ranks", "seq_len": "tokens in the sequence", "prompt_tokens": "tokens in the prompt"}
Metric = tuple[str, Callable]
"""(label, row -> (measured, predicted)); either may be None."""


@contextlib.contextmanager
def figure(
    path: pathlib.Path, rows: int, columns: int, *, size: tuple[float, float], title: str, bottom: float = 0, **options
) -> Iterator:
    """An array [rows, columns] of axes, written to `path` when the block ends.

    size: inches. bottom: inches left free for a legend below the axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    whole, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
    try:
        yield axes
        whole.suptitle(title, fontsize=8)
        whole.tight_layout(rect=(0, bottom / size[1], 1, 1))
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


def grouped(rows, key: Callable) -> dict:
    """{key(row): rows with that key}, in the order of first occurrence."""
    found: dict = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def draw_sweep(path: pathlib.Path, groups: dict[str, list], x: str, metrics: tuple[Metric, ...], title: str) -> None:
    """Panels: a line for each group of rows, a column for each metric; curves by schedule over the field `x`."""
    height = 3.6 * len(groups) + 0.8
    with figure(path, len(groups), len(metrics), size=(13, height), title=title, bottom=0.8) as axes:
        shown: dict = {}
        for line, (heading, rows) in zip(axes, groups.items()):
            for ax, (name, metric) in zip(line, metrics):
                _curves(ax, rows, x, metric, shown)
                label(ax, AXES[x], name)
            line[0].set_title(heading, fontsize=9, loc="left")
        axes[0, 0].figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=6, fontsize=8)


def draw_bars(path: pathlib.Path, groups: dict[str, list], metrics: tuple[Metric, ...], title: str) -> None:
    """The same panels for single cases: a bar for each schedule, the fastest at the bottom."""
    with figure(path, len(groups), len(metrics), size=(13, 3.6 * len(groups) + 0.8), title=title) as axes:
        for line, (heading, rows) in zip(axes, groups.items()):
            for ax, (name, metric) in zip(line, metrics):
                _bars(ax, rows, metric)
                label(ax, name, "")
            line[0].set_title(heading, fontsize=9, loc="left")


def _curves(ax, rows: list, x: str, metric: Callable, shown: dict) -> None:
    limits = itertools.cycle(("--", ":", "-."))
    for name, of_name in grouped(rows, lambda r: r.schedule).items():
        points = [(getattr(r, x), *metric(r)) for r in sorted(of_name, key=lambda r: getattr(r, x))]
        measured, predicted = ([(p[0], p[i]) for p in points if p[i]] for i in (1, 2))
        limit = name not in COLOURS
        style = dict(color="grey", linestyle=next(limits)) if limit else dict(color=COLOURS[name], marker=".")
        if limit and len(measured) == 1:
            shown[name] = ax.axhline(measured[0][1], **style, linewidth=1)
        elif measured:
            shown[name] = ax.plot(*zip(*measured), linewidth=2 if name == "auto" else 1.2, **style)[0]
        if predicted:
            circles = dict(marker="o", mfc="none", mec=COLOURS[name], linestyle="none", markersize=8)
            shown["predicted"] = ax.plot(*zip(*predicted), **circles)[0]
    xs = sorted({getattr(r, x) for r in rows})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(xs, [str(n) if x == "ranks" or n % 1024 else f"{n // 1024}k" for n in xs])


def _bars(ax, rows: list, metric: Callable) -> None:
    found = sorted(((r.schedule, *metric(r)) for r in rows if metric(r)[0]), key=lambda bar: bar[1])
    if not found:
        return
    names, measured, _ = zip(*found)
    ax.barh(names, measured, color=[COLOURS.get(name, "lightgrey") for name in names], height=0.6)
    if predicted := [(p, name) for name, _, p in found if p]:
        ax.plot(*zip(*predicted), marker="o", mfc="none", mec="grey", mew=2, linestyle="none", markersize=8)
    if measured[-1] > 100 * measured[0]:
        ax.set_xscale("log")
