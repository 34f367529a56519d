"""The rows of `bench decode` and `bench train`: how they are made from what the ranks measured, printed and drawn."""

from __future__ import annotations

import functools
import statistics
from typing import NamedTuple

from ..plan import Cost
from .figures import draw_bars, draw_sweep, grouped
from .measure import Measured
from .results import Plots, num_bytes, percentiles, table
from .runs import Case, Settings


class Predicted(NamedTuple):
    """The planner's prediction for one pass of one schedule."""

    plan: str
    cost: Cost


class Outcome(NamedTuple):
    """One rank's outcome of one schedule; `measured` is None if the error, as a fraction of the allowed one, is > 1."""

    schedule: str
    error: float
    measured: Measured | None


class Measurement(NamedTuple):
    """One pass of one schedule in one case, or a limit: a line of results.csv. None: does not apply."""

    machines: str
    ranks: int
    seq_len: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    batch: int
    dtype: str
    compute: str
    dilate: float
    schedule: str
    part: str
    """"decode"; "forward", "backward" and "total"; "limit" for lower bounds and an ideal ring."""
    plan: str | None = None
    steps: int | None = None
    ms: float | None = None
    """Median over steps of the slowest rank's time."""
    p10_ms: float | None = None
    p90_ms: float | None = None
    predicted_ms: float | None = None
    sent_bytes: int | None = None
    """Payload that a rank sends, mean over the ranks."""
    predicted_sent_bytes: int | None = None
    node_bytes: int | None = None
    """What a node's network interface sent, headers included, mean over the nodes."""
    predicted_node_bytes: int | None = None
    memory_bytes: int | None = None
    """A rank's peak memory above what was resident before the step, maximum over the ranks."""
    predicted_memory_bytes: int | None = None
    held_bytes: int | None = None
    """What a rank holds before the step: its shard."""
    error: float | None = None
    """Largest error against float64 on any rank, as a fraction of the allowed error."""
    late_start_ms: float | None = None
    """Median over steps of the last rank's delay at the start."""
    late_compute_ms: float | None = None
    """Median overrun of an emulated kernel, maximum over the ranks."""


def measurement(case: Case, how: Settings, **values) -> Measurement:
    """A row of a case."""
    given = {**case._asdict(), "machines": case.machines.label, "ranks": case.machines.ranks}
    return Measurement(**given, compute=how.compute, dilate=how.dilate, **values)


def measurements(
    case: Case, how: Settings, outcomes: tuple[Outcome, ...], predicted: dict[str, Predicted], held_bytes: int
) -> list[Measurement]:
    """Rows of one schedule from all ranks' outcomes: one for each pass and, if there are several, their total."""
    ranks = [outcome.measured for outcome in outcomes]
    first, ms = ranks[0], 1e3 / how.dilate
    parts = {name: [name] for name in first.seconds}
    if len(parts) > 1:
        parts["total"] = list(first.seconds)
    rows = []
    for part, passes in parts.items():
        costs = [predicted[name].cost for name in passes]
        times = percentiles([sum(step) for step in zip(*(first.seconds[name] for name in passes))])
        rows.append(
            measurement(
                case,
                how,
                schedule=outcomes[0].schedule,
                part=part,
                plan=" / ".join(dict.fromkeys(predicted[name].plan for name in passes)),
                steps=len(first.seconds[passes[0]]),
                ms=ms * times[50],
                p10_ms=ms * times[10],
                p90_ms=ms * times[90],
                predicted_ms=ms * sum(cost.time_s for cost in costs),
                sent_bytes=round(statistics.mean(sum(m.sent[name] for name in passes) for m in ranks)),
                predicted_sent_bytes=round(sum(cost.bytes for cost in costs)),
            )
        )
    whole = dict(  # of all passes: `costs` are those of the last part, which has all of them
        memory_bytes=max((m.memory for m in ranks if m.memory is not None), default=None),
        predicted_memory_bytes=max(cost.peak_bytes for cost in costs),
        held_bytes=held_bytes,
        error=outcomes[0].error,
        late_start_ms=ms * first.late_start,
        late_compute_ms=ms * max(m.late_compute for m in ranks),
    )
    if case.machines.nodes > 1:
        per_node = case.machines.ranks_per_node
        whole["node_bytes"] = round(statistics.mean(m.network["network"] for m in ranks[::per_node]))
        whole["predicted_node_bytes"] = round(per_node * sum(cost.bytes_per_level[-1] for cost in costs))
    rows[-1] = rows[-1]._replace(**whole)
    return rows


COLUMNS = (
    ("median ms", 10, lambda r: r.ms),
    ("p10", 8, lambda r: r.p10_ms),
    ("p90", 8, lambda r: r.p90_ms),
    ("predicted", 9, lambda r: r.predicted_ms),
    ("sent/rank", 9, lambda r: num_bytes(r.sent_bytes)),
    ("predicted", 9, lambda r: num_bytes(r.predicted_sent_bytes)),
    ("sent/node", 9, lambda r: num_bytes(r.node_bytes)),
    ("predicted", 9, lambda r: num_bytes(r.predicted_node_bytes)),
    ("memory", 8, lambda r: num_bytes(r.memory_bytes)),
    ("predicted", 9, lambda r: num_bytes(r.predicted_memory_bytes)),
)


def table_of(case: Case, rows: list[Measurement]) -> str:
    """The table of one case; "x auto" is the time divided by auto's."""
    last = [r for r in rows if r.late_start_ms is not None]
    auto = {r.part: r.ms for r in rows if r.schedule == "auto"}

    def ratio(r: Measurement) -> float | None:
        base = auto.get(r.part, auto.get("decode", auto.get("total")))
        return base and r.ms / base

    names = [r.schedule + f" {r.part}" * (r.part in ("forward", "backward")) for r in rows]
    heading, *lines = table(names, rows, (("x auto", 8, ratio), *COLUMNS))
    lines = [line + f"  {r.plan}" * (r.schedule == "auto") for line, r in zip(lines, rows)]
    overrun = f"; modelled kernels overran {max(r.late_compute_ms for r in last):.2g} ms"
    return "\n".join(
        [
            f"\n{case.label}",
            "  every schedule's result was checked on all ranks: "
            f"worst error {max(r.error for r in last):.2g} of what is allowed",
            heading,
            *lines,
            f"  ranks began at most {max(r.late_start_ms for r in last):.2g} ms late"
            f"{overrun * (last[0].compute == 'modelled')} (medians)",
        ]
    )


def _megabytes(*parts: int | None) -> float | None:
    return None if None in parts else sum(parts) / 1e6


METRICS = (
    ("time of a step (ms)", lambda r: (r.ms, r.predicted_ms)),
    ("payload sent by a rank (MB)", lambda r: (_megabytes(r.sent_bytes), _megabytes(r.predicted_sent_bytes))),
    (
        "memory of a rank: shard and buffers (MB)",
        lambda r: (_megabytes(r.memory_bytes, r.held_bytes), _megabytes(r.predicted_memory_bytes, r.held_bytes)),
    ),
)


def plots(rows: list[Measurement], title: str) -> Plots:
    """Figures over sequence length and over ranks, where these vary; else bars of each case."""
    rows = [r for r in rows if r.part in ("decode", "total", "limit")]
    heads = lambda r: f"{r.num_heads}/{r.num_heads_kv} heads x {r.head_dim}"  # noqa: E731
    found: Plots = {}
    for name, x, heading in (
        ("seq-len.png", "seq_len", lambda r: f"{r.machines} ranks, {heads(r)}"),
        ("ranks.png", "ranks", lambda r: f"{_network(r)}, {r.seq_len} tokens, {heads(r)}"),
    ):
        groups = {k: g for k, g in grouped(rows, heading).items() if len({getattr(r, x) for r in g}) > 1}
        if groups:
            found[name] = functools.partial(draw_sweep, groups=groups, x=x, metrics=METRICS, title=title)
    cases = grouped(rows, lambda r: f"{r.machines} ranks, {r.seq_len} tokens, {heads(r)}")
    return found or {"results.png": functools.partial(draw_bars, groups=cases, metrics=METRICS, title=title)}


def _network(r: Measurement) -> str:
    if "local" in r.machines:
        return "loopback"
    return "flat network" if r.machines.endswith("x1") else "nodes of several ranks"
