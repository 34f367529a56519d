"""The report of a soak: a line for each incarnation, the checks, CSV, JSON and a plot."""

from __future__ import annotations

import functools
import pathlib
import statistics
from typing import NamedTuple

from ..figures import figure
from ..results import write_results
from .checks import Check, accused, growth, warm_samples
from .incarnation import SLACK_S
from .records import Incarnation, Record

SAID = 300  # characters of a survivor's error in the JSON


class Summary(NamedTuple):
    """One incarnation: a line of results.csv."""

    incarnation: int
    work: str
    round: int
    began_s: float
    ended_s: float
    first: int
    last: int
    end: str
    at_s: float | None
    during: str
    survivors: int | None
    fastest_s: float | None
    slowest_s: float | None
    named: int | None
    """Survivors that named the lost rank, and it alone."""
    anonymous_mb: float | None
    """Mean over the ranks and the time."""
    growth: float | None
    """The largest of the ranks."""


def summary(record: Record, x: Incarnation) -> Summary:
    """The line of one incarnation."""
    warm = [s for (_, who), s in warm_samples(record, x.number).items() if who != "parent"]
    kill = x.kill
    times = [s.seconds for s in kill.survivors if s.seconds is not None] if kill else []
    return Summary(
        incarnation=x.number,
        work=x.work,
        round=x.round,
        began_s=round(x.began_s, 1),
        ended_s=round(x.ended_s, 1),
        first=x.expected_first,
        last=x.last,
        end=f"{kill.signal} of rank {kill.rank}" if kill else "failed" if x.failed else "finished",
        at_s=round(kill.at_s, 1) if kill else None,
        during=kill.during if kill else "",
        survivors=len(kill.survivors) if kill else None,
        fastest_s=round(min(times), 2) if times else None,
        slowest_s=round(max(times), 2) if times else None,
        named=sum(accused(s.said) == {kill.rank} for s in kill.survivors) if kill else None,
        anonymous_mb=round(statistics.fmean(s.anonymous for of in warm for s in of) / 1e6, 1) if warm else None,
        growth=round(max(growth(s, "anonymous") for s in warm), 5) if warm else None,
    )


def line(r: Summary) -> str:
    """One incarnation in words."""
    text = f"{r.incarnation:>3}  {_clock(r.began_s)}-{_clock(r.ended_s)}  {r.work:<8} round {r.round}"
    text += f"  {r.first:>5} to {r.last:<5}"
    if r.end != "finished":
        text += f" {r.end}"
    if r.at_s is not None:
        text += f" in {r.during or '?'}: survivors ended after {r.fastest_s} to {r.slowest_s} s, "
        text += f"{r.named} of {r.survivors} named it"
    if r.anonymous_mb is not None:
        text += f"; {r.anonymous_mb:.0f} MB a rank, {r.growth:+.2%}"
    return text


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:>2}:{int(seconds) % 60:02d}"


def table(checks: list[Check]) -> str:
    """The checks, with their ratios to what is allowed."""
    width = max(len(c.name) for c in checks)
    lines = [f"\n{'check':<{width}}      found    allowed   ratio"]
    for c in checks:
        ratio = f"{c.found / c.allowed:7.3f}" if c.allowed else "      -"
        lines.append(
            f"{c.name:<{width}} {c.found:>10.4g} {c.allowed:>10.4g} {ratio}  {'ok   ' if c.ok else 'WRONG'} {c.text}"
        )
    return "\n".join(lines)


def write(folder: pathlib.Path, record: Record, checks: list[Check], about: dict) -> None:
    """Write results.csv, results.json and results.png."""
    kills = [_kill(x) for x in record.incarnations if x.kill]
    about = {**about, "checks": [{**c._asdict(), "ok": c.ok} for c in checks], "kills": kills}
    rows = [summary(record, x) for x in record.incarnations]
    write_results(folder, rows, about, {"results.png": functools.partial(_draw, record=record)})


def _kill(x: Incarnation) -> dict:
    survivors = [{**s._asdict(), "said": s.said[:SAID], "accused": sorted(accused(s.said))} for s in x.kill.survivors]
    return {"incarnation": x.number, "work": x.work, **x.kill._asdict(), "survivors": survivors}


def _draw(path: pathlib.Path, record: Record) -> None:
    with figure(path, 3, 1, size=(11, 9), title="", sharex=True, height_ratios=(3, 2.2, 1.6)) as axes:
        losses, memory, ends = axes[:, 0]
        seen = {(n, step): loss for n, step, loss in record.seen_losses}
        points = [
            (at / 60, record.losses[str(step)], seen[n, str(step)])
            for at, n, step in record.step_times
            if (n, str(step)) in seen and str(step) in record.losses
        ]
        if points:
            minutes, truth, found = zip(*points)
            losses.plot(minutes, truth, ".", color="black", markersize=6, label="the undisturbed run's loss")
            losses.plot(minutes, found, ".", color="tab:cyan", markersize=2, label="the soak's loss of that step")
        losses.set_ylabel("training loss (nats)")
        forked = {s.incarnation: s.anonymous for s in reversed(record.samples) if s.who == "parent"}
        for who in dict.fromkeys(s.who for s in record.samples if s.who != "parent"):
            mine = [s for s in record.samples if s.who == who]
            own = [(s.anonymous - forked[s.incarnation]) / 1e6 for s in mine]
            memory.plot([s.at_s / 60 for s in mine], own, ".", markersize=2, label=f"rank {who}")
        memory.set_ylabel("memory beyond what it\nwas forked with (MB)")
        memory.set_ylim(bottom=0)
        for x in record.incarnations:
            if x.work == "generate":
                for ax in axes[:, 0]:
                    ax.axvspan(x.began_s / 60, x.ended_s / 60, color="tab:grey", alpha=0.15, linewidth=0)
            if x.kill:
                at, took = x.kill.at_s / 60, [s.seconds for s in x.kill.survivors if s.seconds is not None]
                for ax in axes[:, 0]:
                    ax.axvline(at, color="tab:red" if x.kill.signal == "SIGKILL" else "tab:purple", linewidth=1)
                style = dict(fontsize=7, rotation=90, va="top", ha="right", xycoords=("data", "axes fraction"))
                losses.annotate(f"rank {x.kill.rank}", (at, 1), **style)
                ends.plot([at] * len(took), took, "o", color="black", markersize=3)
        ends.axhline(record.limit_s + SLACK_S, color="grey", linestyle="--", label="time limit + 2 s")
        ends.set_ylabel("survivors ended\nafter (s)")
        ends.set_xlabel("minutes (red: SIGKILL, purple: SIGSTOP; shaded: generation, else training)")
        for ax in axes[:, 0]:
            ax.grid(alpha=0.3)
            if ax.get_legend_handles_labels()[0]:
                ax.legend(fontsize=7, loc="upper right", markerscale=3)
