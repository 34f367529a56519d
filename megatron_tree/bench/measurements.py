"""The rows of `bench decode`, `bench train` and `bench generate`: made from what the ranks measured, printed, drawn."""

from __future__ import annotations

import functools
import statistics
from typing import NamedTuple

from ..plan import Cost
from ..units import format_bytes
from .figures import Curve, Panel, draw, grouped
from .measure import Measured
from .results import Plots


class Predicted(NamedTuple):
    """The planner's prediction for one pass of one schedule."""

    plan: str
    cost: Cost


class Measurement(NamedTuple):
    """One pass of one contender in one case, or a limit: a line of results.csv. None: does not apply."""

    machines: str
    ranks: int
    seq_len: int
    """Tokens of the whole sequence, or of the prompt."""
    model: str | None = None
    new_tokens: int | None = None
    cache: str | None = None
    num_heads: int | None = None
    num_heads_kv: int | None = None
    head_dim: int | None = None
    batch: int | None = None
    dtype: str | None = None
    compute: str | None = None
    dilate: float | None = None
    schedule: str = ""
    part: str = ""
    """"decode", "token"; "forward", "backward" and "total"; "limit" for lower bounds and an ideal ring."""
    plan: str | None = None
    steps: int | None = None
    ms: float | None = None
    """Median over steps (or tokens after the first) of the slowest rank's time."""
    p10_ms: float | None = None
    p90_ms: float | None = None
    ratio: float | None = None
    """ms divided by that of `auto`, or of the first schedule."""
    predicted_ms: float | None = None
    prefill_ms: float | None = None
    first_token_ms: float | None = None
    """From the prompt to the first new token: the prefill, which all schedules share, and one step."""
    tokens_per_s: float | None = None
    sent_bytes: int | None = None
    """Payload that a rank sends in a step, mean over the ranks."""
    predicted_sent_bytes: int | None = None
    node_bytes: int | None = None
    """What a node's network interface sent in a step, headers included, mean over the nodes."""
    predicted_node_bytes: int | None = None
    memory_bytes: int | None = None
    """A rank's peak memory above what was resident before the step, maximum over the ranks."""
    predicted_memory_bytes: int | None = None
    held_bytes: int | None = None
    """What a rank holds before the step: its shard or its cache."""
    error: float | None = None
    """Largest error on any rank: against float64, as a fraction of the allowed error, or of the largest logit."""
    late_start_ms: float | None = None
    """Median over steps of the last rank's delay at the start."""
    late_compute_ms: float | None = None
    """Median overrun of an emulated kernel, maximum over the ranks."""


def measurements(
    base: Measurement,
    ranks: list[Measured],
    predicted: dict[str, Predicted],
    *,
    ranks_per_node: int,
    dilate: float = 1.0,
) -> list[Measurement]:
    """Rows of one schedule from all ranks: one for each pass and, if there are several, their total.

    base: what all of them share. predicted: by pass; empty for a contender that the planner does not know.
    """
    ms, parts, rows = 1e3 / dilate, {name: [name] for name in ranks[0].seconds}, []
    if len(parts) > 1:
        parts["total"] = list(ranks[0].seconds)
    for part, passes in parts.items():
        steps = [[sum(times) for times in zip(*(rank.seconds[name] for name in passes))] for rank in ranks]
        slowest = sorted(map(max, zip(*steps)))
        row = base._replace(
            part=part,
            steps=len(slowest),
            ms=ms * statistics.median(slowest),
            p10_ms=ms * slowest[round((len(slowest) - 1) * 0.1)],
            p90_ms=ms * slowest[round((len(slowest) - 1) * 0.9)],
            sent_bytes=round(statistics.mean(sum(rank.sent[name] for name in passes) for rank in ranks)),
        )
        if predicted:
            costs = [predicted[name].cost for name in passes]
            row = row._replace(
                plan=" / ".join(dict.fromkeys(predicted[name].plan for name in passes)),
                predicted_ms=ms * sum(cost.time_s for cost in costs),
                predicted_sent_bytes=round(sum(cost.bytes for cost in costs)),
            )
        rows.append(row)
    last = rows[-1]._replace(  # of all passes
        memory_bytes=max((rank.memory for rank in ranks if rank.memory is not None), default=None),
        late_start_ms=None if ranks[0].late_start is None else ms * ranks[0].late_start,
        late_compute_ms=None if ranks[0].late_compute is None else ms * max(rank.late_compute for rank in ranks),
    )
    if ranks[0].network is not None:
        last = last._replace(node_bytes=round(statistics.mean(rank.network for rank in ranks[::ranks_per_node])))
    if predicted:
        last = last._replace(predicted_memory_bytes=max(cost.peak_bytes for cost in costs))
        if last.node_bytes is not None:
            sent = round(ranks_per_node * sum(cost.bytes_per_level[-1] for cost in costs))
            last = last._replace(predicted_node_bytes=sent)
    return [*rows[:-1], last]


def with_ratios(rows: list[Measurement]) -> list[Measurement]:
    """The rows of one case, with each time divided by that of `auto`, or else of the first schedule."""
    first = next(r.schedule for r in rows if r.schedule != "plain")
    name = "auto" if any(r.schedule == "auto" for r in rows) else first
    base = {r.part: r.ms for r in rows if r.schedule == name}
    whole = list(base.values())[-1]
    return [r._replace(ratio=r.ms / base.get(r.part, whole)) for r in rows]


COLUMNS = (
    ("x auto", 8, lambda r: r.ratio),
    ("first ms", 9, lambda r: r.first_token_ms),
    ("median ms", 10, lambda r: r.ms),
    ("p10", 8, lambda r: r.p10_ms),
    ("p90", 8, lambda r: r.p90_ms),
    ("predicted", 9, lambda r: r.predicted_ms),
    ("tokens/s", 8, lambda r: r.tokens_per_s),
    ("sent/rank", 9, lambda r: _bytes(r.sent_bytes)),
    ("predicted", 9, lambda r: _bytes(r.predicted_sent_bytes)),
    ("sent/node", 9, lambda r: _bytes(r.node_bytes)),
    ("predicted", 9, lambda r: _bytes(r.predicted_node_bytes)),
    ("holds", 8, lambda r: _bytes(r.held_bytes)),
    ("memory", 8, lambda r: _bytes(r.memory_bytes)),
    ("predicted", 9, lambda r: _bytes(r.predicted_memory_bytes)),
)
"""(heading, width, row -> number, text or None); columns that are empty in all rows are left out."""


def table_of(label: str, checked: str, rows: list[Measurement]) -> str:
    """The table of one case. checked: says how the results were verified."""
    names = [r.schedule + f" {r.part}" * (r.part in ("forward", "backward")) for r in rows]
    width = max(map(len, names))
    columns = [column for column in COLUMNS if any(column[2](r) is not None for r in rows)]
    lines = [f"\n{label}", f"  {checked}", " " * (width + 3) + " ".join(f"{heading:>{w}}" for heading, w, _ in columns)]
    for name, row in zip(names, rows):
        cells = " ".join(f"{_cell(value(row)):>{w}}" for _, w, value in columns)
        lines.append(f"  {name:<{width}} {cells}" + f"  {row.plan}" * (row.schedule == "auto" and row.plan is not None))
    if late := [r.late_start_ms for r in rows if r.late_start_ms is not None]:
        overrun = max(r.late_compute_ms or 0.0 for r in rows)
        text = f"; modelled kernels overran {overrun:.2g} ms" * (rows[0].compute == "modelled")
        lines.append(f"  ranks began at most {max(late):.2g} ms late{text} (medians)")
    return "\n".join(lines)


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _bytes(value: float | None) -> str | None:
    return None if value is None else format_bytes(value)


def _sum(scale: float, *parts: float | None) -> float | None:
    return None if None in parts else sum(parts) * scale


METRICS = (
    ("time of a step (ms)", lambda r: (r.ms, r.predicted_ms)),
    ("payload sent by a rank (MB)", lambda r: (_sum(1e-6, r.sent_bytes), _sum(1e-6, r.predicted_sent_bytes))),
    (
        "memory of a rank: shard and buffers (MB)",
        lambda r: (
            _sum(1e-6, r.memory_bytes or 0 if r.sent_bytes is not None else None, r.held_bytes),
            _sum(1e-6, r.predicted_memory_bytes, r.held_bytes),
        ),
    ),
)


def plots(rows: list[Measurement], title: str) -> Plots:
    """Figures over sequence length and over ranks, where these vary; else bars of each case."""
    rows = [r for r in rows if r.part not in ("forward", "backward")]
    what = lambda r: r.model or f"{r.num_heads}/{r.num_heads_kv} heads x {r.head_dim}"  # noqa: E731
    found: Plots = {}
    for name, x, heading in (
        ("seq-len.png", lambda r: r.seq_len / 1024, lambda r: f"{r.machines} ranks, {what(r)}"),
        ("ranks.png", lambda r: r.ranks, lambda r: f"{_network(r)}, {r.seq_len} tokens, {what(r)}"),
    ):
        groups = {k: g for k, g in grouped(rows, heading).items() if len(set(map(x, g))) > 1}
        if groups:
            axis = {"seq-len.png": "tokens, thousands (1024)", "ranks.png": "ranks"}[name]
            found[name] = functools.partial(draw, panels=_panels(groups, x, axis), title=title)
    cases = grouped(rows, lambda r: f"{r.machines} ranks, {r.seq_len} tokens, {what(r)}")
    return found or {"results.png": functools.partial(draw, panels=_panels(cases, None, ""), title=title)}


def _panels(groups: dict[str, list[Measurement]], x, axis: str) -> list[list[Panel]]:
    """A line for each group of rows, a column for each metric; x: row -> its place, None: bars of the schedules."""
    lines = []
    for heading, rows in groups.items():
        line = []
        for name, metric in METRICS:
            mine = [(r, *metric(r)) for r in rows if metric(r)[0]]
            limits = iter(("--", ":", "-.") * 9)
            curves = []
            if x is None:
                curves = [Curve("measured", *zip(*((r.schedule, y, p) for r, y, p in mine)))]
            for schedule, of in grouped(mine, lambda found: found[0].schedule).items() if x else ():
                style = dict(color="grey", linestyle=next(limits)) if of[0][0].part == "limit" else {}
                points = sorted((x(r), y, p) for r, y, p in of)
                curves.append(Curve(schedule, *zip(*points), style))
            line.append(Panel(axis if x else name, name if x else "", curves, heading * (not line)))
        lines.append(line)
    return lines


def _network(r: Measurement) -> str:
    if "local" in r.machines:
        return "loopback"
    return "flat network" if r.machines.endswith("x1") else "nodes of several ranks"
