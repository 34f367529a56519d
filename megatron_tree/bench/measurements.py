"""The rows of `bench decode`, `bench train` and `bench generate`: made from what the ranks measured, printed, drawn."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from .measure import Measured
from .results import Curve, Panel, grouped
from .runs import Machines

PASSES = ("batch", "forward", "backward", "optimizer")


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
    batch: int | None = None
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
    base: Measurement, ranks: list[Measured], predicted: dict, machines: Machines, dilate: float = 1.0
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
        whole["node_bytes"] = round(statistics.mean(rank.network for rank in ranks[:: machines.ranks_per_node]))
    if costs:  # of all passes
        whole["predicted_memory_bytes"] = max(cost.peak_bytes for cost in costs)
        if ranks[0].network is not None:
            node = machines.ranks_per_node * sum(cost.bytes_per_level[-1] for cost in costs)
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
