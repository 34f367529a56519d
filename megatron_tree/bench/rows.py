"""What the benchmarks of several ranks put down: rows of results.csv, and the table that is printed."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from ..plan import Cost
from ..plan.plans import size
from .measure import Measured
from .runs import Case, Settings


class Predicted(NamedTuple):
    """What the planner says of one pass of one schedule."""

    plan: str
    cost: Cost


class Outcome(NamedTuple):
    """What a rank returns of one schedule; nothing was timed if the error, a share of what is allowed, is above 1."""

    schedule: str
    error: float
    measured: Measured | None


class Row(NamedTuple):
    """One pass of one schedule in one case, or a limit: a line of results.csv. Empty is what does not apply."""

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
    """"decode"; "forward", "backward" and "total"; "limit" for what no schedule can beat, and for an ideal ring."""
    plan: str | None
    steps: int | None
    ms: float
    """Median over steps of the slowest rank's time."""
    p10_ms: float | None
    p90_ms: float | None
    predicted_ms: float | None
    sent_bytes: int | None
    """Payload that a rank sends, mean over the ranks."""
    predicted_sent_bytes: int | None
    node_bytes: int | None
    """What a node's interface to the network sent, headers included, mean over the nodes."""
    predicted_node_bytes: int | None
    memory_bytes: int | None
    """Most memory of a rank above what was resident before the step, the largest of the ranks."""
    predicted_memory_bytes: int | None
    held_bytes: int | None
    """What a rank holds before the step: its shard."""
    error: float | None
    """Largest error against float64 on any rank, as a share of what is allowed."""
    late_start_ms: float | None
    """Median over steps of how late the last rank began."""
    late_compute_ms: float | None
    """By how much an emulated kernel overran, the worst rank's median."""


def schedule_rows(
    case: Case, how: Settings, outcomes: tuple[Outcome, ...], predicted: dict[str, Predicted], held_bytes: int
) -> list[Row]:
    """Rows of one schedule from what all ranks measured: one for each pass and, if there are several, their total."""
    measured = [outcome.measured for outcome in outcomes]
    first = measured[0]
    parts = {name: [name] for name in first.seconds}
    if len(parts) > 1:
        parts["total"] = list(first.seconds)
    rows = []
    for part, passes in parts.items():
        costs = [predicted[name].cost for name in passes]
        plans = dict.fromkeys(predicted[name].plan for name in passes)
        whole = {}
        if part == list(parts)[-1]:
            whole = dict(
                memory_bytes=max((m.memory for m in measured if m.memory is not None), default=None),
                predicted_memory_bytes=max(cost.peak_bytes for cost in costs),
                held_bytes=held_bytes,
                error=outcomes[0].error,
                late_start_ms=_ms(first.late_start, how),
                late_compute_ms=_ms(max(m.late_compute for m in measured), how),
            )
            if case.machines.nodes > 1:
                one_of_each = measured[:: case.machines.ranks_per_node]
                across = sum(cost.bytes_per_level[-1] for cost in costs)
                whole["node_bytes"] = round(statistics.mean(m.network["network"] for m in one_of_each))
                whole["predicted_node_bytes"] = round(across * case.machines.ranks_per_node)
        rows.append(
            row(
                case,
                how,
                schedule=outcomes[0].schedule,
                part=part,
                plan=" / ".join(plans),
                **_times([sum(step) for step in zip(*(first.seconds[name] for name in passes))], how),
                predicted_ms=_ms(sum(c.time_s for c in costs), how),
                sent_bytes=round(statistics.mean(sum(m.sent[name] for name in passes) for m in measured)),
                predicted_sent_bytes=round(sum(sum(cost.bytes_per_level) for cost in costs)),
                **whole,
            )
        )
    return rows


def row(case: Case, how: Settings, **values) -> Row:
    """A row of a case; fields that are not given stay empty."""
    given = {**case._asdict(), "machines": case.machines.label, "ranks": case.machines.ranks}
    return Row(**{**dict.fromkeys(Row._fields), **given, "compute": how.compute, "dilate": how.dilate, **values})


def _times(seconds: list[float], how: Settings) -> dict:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    p10, p90 = ordered[round(last * 0.1)], ordered[round(last * 0.9)]
    return dict(steps=len(seconds), **{
        name: _ms(s, how) for name, s in (("ms", statistics.median(ordered)), ("p10_ms", p10), ("p90_ms", p90))
    })  # fmt: skip


def _ms(seconds: float, how: Settings) -> float:
    return seconds / how.dilate * 1e3


COLUMNS = (
    ("median ms", 10, lambda r: _number(r.ms)),
    ("p10", 8, lambda r: _number(r.p10_ms)),
    ("p90", 8, lambda r: _number(r.p90_ms)),
    ("predicted", 9, lambda r: _number(r.predicted_ms)),
    ("sent/rank", 9, lambda r: _size(r.sent_bytes)),
    ("predicted", 9, lambda r: _size(r.predicted_sent_bytes)),
    ("sent/node", 9, lambda r: _size(r.node_bytes)),
    ("predicted", 9, lambda r: _size(r.predicted_node_bytes)),
    ("memory", 8, lambda r: _size(r.memory_bytes)),
    ("predicted", 9, lambda r: _size(r.predicted_memory_bytes)),
)


def table(case: Case, rows: list[Row]) -> str:
    """The rows of one case for people; "x auto" is the time divided by auto's."""
    checked = [r.error for r in rows if r.error is not None]
    auto = {r.part: r.ms for r in rows if r.schedule == "auto"}
    names = [f"{r.schedule}" + (f" {r.part}" if r.part not in ("decode", "limit", "total") else "") for r in rows]
    width = max(map(len, names))
    lines = [
        f"\n{case.label}",
        f"  every schedule's result was checked on all ranks: worst error {max(checked):.2g} of what is allowed",
        "  " + " " * width + "   x auto " + " ".join(f"{name:>{w}}" for name, w, _ in COLUMNS),
    ]
    for name, r in zip(names, rows):
        base = auto.get(r.part, auto.get("decode", auto.get("total")))
        ratio = f"{r.ms / base:8.3g}" if base else " " * 8
        plan = f"  {r.plan}" if r.plan and r.schedule == "auto" else ""
        lines.append(f"  {name:<{width}} {ratio} " + " ".join(f"{show(r):>{w}}" for _, w, show in COLUMNS) + plan)
    last = [r for r in rows if r.late_start_ms is not None]
    overrun = max(r.late_compute_ms for r in last)
    modelled = f"; modelled kernels overran {overrun:.2g} ms" if last[0].compute == "modelled" else ""
    lines.append(f"  ranks began at most {max(r.late_start_ms for r in last):.2g} ms late{modelled} (medians)")
    return "\n".join(lines)


def _number(x: float | None) -> str:
    """Three digits, no exponent below a million."""
    return "" if x is None else f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def _size(n: float | None) -> str:
    return "" if n is None else size(n)
