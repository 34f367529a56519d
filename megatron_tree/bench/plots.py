"""Plots of the benchmarks of several ranks: time, bytes and memory against sequence length and against ranks."""

from __future__ import annotations

import functools
import io
import itertools
import pathlib
from collections.abc import Callable

from .rows import Row

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
}
METRICS = (
    ("time of a step (ms)", lambda r: (r.ms, r.predicted_ms)),
    ("payload sent by a rank (MB)", lambda r: (_mb(r.sent_bytes), _mb(r.predicted_sent_bytes))),
    (
        "memory of a rank: shard and buffers (MB)",
        lambda r: (_mb(r.memory_bytes, r.held_bytes), _mb(r.predicted_memory_bytes, r.held_bytes)),
    ),
)


def plots(rows: list[Row], title: str) -> dict[str, Callable[[pathlib.Path], None]]:
    """What to draw of these rows, by file name: against sequence length and against ranks, where these vary."""
    found = {}
    for name, axis, group in (
        ("seq-len.png", "seq_len", lambda r: (r.machines, r.num_heads_kv)),
        ("ranks.png", "ranks", lambda r: (_network(r), r.seq_len, r.num_heads_kv)),
    ):
        groups = _grouped(rows, group)
        curves = {k: v for k, v in groups.items() if len({getattr(r, axis) for r in v}) > 1}
        if curves:
            found[name] = functools.partial(_draw, curves, axis, title)
    if not found:
        found["results.png"] = functools.partial(_draw, _grouped(rows, lambda r: r[:7]), None, title)
    return found


def _network(r: Row) -> str:
    if not r.machines[0].isdigit() or "x" not in r.machines:
        return "loopback"
    return "flat network" if r.machines.endswith("x1") else "nodes of several ranks"


def _grouped(rows, key) -> dict:
    kept = [r for r in rows if r.part in ("decode", "total", "limit")]
    return {k: list(g) for k, g in itertools.groupby(sorted(kept, key=key), key=key)}


def _mb(*numbers: int | None) -> float | None:
    return None if None in numbers else sum(numbers) / 1e6


def _draw(groups: dict, axis: str, title: str, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, axes = plt.subplots(len(groups), len(METRICS), figsize=(13, 3.6 * len(groups) + 0.8), squeeze=False)
    shown: dict[str, Line2D] = {}
    for line, rows in zip(axes, groups.values()):
        for ax, (label, metric) in zip(line, METRICS):
            if axis:
                _curves(ax, rows, axis, metric, shown)
                ax.set_ylabel(label, fontsize=8)
            else:
                _bars(ax, rows, metric)
                ax.set_xlabel(label, fontsize=8)
        line[0].set_title(_describe(rows, axis), fontsize=9, loc="left")
    shown["predicted"] = Line2D([], [], marker="o", mfc="none", color="grey", linestyle="none")
    figure.suptitle(title, fontsize=8)
    figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=6, fontsize=8)
    save(figure, path, dpi=80, bottom=0.8 / figure.get_figheight())


def save(figure, path: pathlib.Path, *, dpi: int, bottom: float = 0.0) -> None:
    """Write a figure, laid out above `bottom`, a share of its height, as a small PNG of few colours, and close it."""
    import matplotlib.pyplot as plt
    from PIL import Image

    figure.tight_layout(rect=(0, bottom, 1, 1))
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    plt.close(figure)
    picture = Image.open(drawn).convert("RGB").quantize(128, method=Image.Quantize.MAXCOVERAGE)
    picture.save(path, format="png", optimize=True)


def _curves(ax, rows: list[Row], axis: str, metric, shown: dict) -> None:
    limits = itertools.cycle(("--", ":", "-."))
    for name, of_name in _by_schedule(rows):
        points = [(getattr(r, axis), *metric(r)) for r in sorted(of_name, key=lambda r: getattr(r, axis))]
        measured = [(x, y) for x, y, _ in points if y]
        predicted = [(x, y) for x, _, y in points if y]
        limit = of_name[0].part == "limit"
        style = dict(color="grey", linestyle=next(limits)) if limit else dict(color=COLOURS[name], marker=".")
        if measured:
            if limit and len(measured) == 1:
                shown[name] = ax.axhline(measured[0][1], **style, linewidth=1)
            else:
                width = 2 if name == "auto" else 1.2
                shown[name] = ax.plot(*zip(*measured), label=name, linewidth=width, **style)[0]
        if predicted:
            ax.plot(*zip(*predicted), marker="o", mfc="none", mec=COLOURS[name], linestyle="none", markersize=8)
    xs = sorted({getattr(r, axis) for r in rows})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(xs, [f"{x // 1024}k" if axis == "seq_len" and x % 1024 == 0 else str(x) for x in xs])
    ax.set_xlabel("tokens in the sequence" if axis == "seq_len" else "ranks", fontsize=8)
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=8)


def _bars(ax, rows: list[Row], metric) -> None:
    """One case: a bar for each schedule and limit, the fastest at the bottom."""
    found = [(r, *metric(r)) for r in rows]
    found = sorted(((r, y, p) for r, y, p in found if y), key=lambda x: x[1])
    if not found:
        return
    names = [r.schedule for r, _, _ in found]
    ax.barh(names, [y for _, y, _ in found], color=[COLOURS.get(name, "lightgrey") for name in names], height=0.6)
    predicted = [(p, name) for name, (_, _, p) in zip(names, found) if p]
    if predicted:
        ax.plot(*zip(*predicted), marker="o", mfc="none", mec="grey", mew=2, linestyle="none", markersize=8)
    if found[-1][1] > 100 * found[0][1]:
        ax.set_xscale("log")
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=8)


def _by_schedule(rows: list[Row]):
    names = dict.fromkeys(r.schedule for r in rows)
    return [(name, [r for r in rows if r.schedule == name]) for name in names]


def _describe(rows: list[Row], axis: str) -> str:
    r = rows[0]
    heads = f"{r.num_heads}/{r.num_heads_kv} heads x {r.head_dim}"
    where = _network(r) if axis == "ranks" else f"{r.machines} ranks"
    return f"{where}, {heads}" if axis == "seq_len" else f"{where}, {r.seq_len} tokens, {heads}"
