"""What `bench generate` puts down: rows of results.csv, the table that is printed, and the plots."""

from __future__ import annotations

import functools
import itertools
import pathlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..plan.plans import size
from .plots import COLOURS, save


@dataclass
class Outcome:
    """What one contender gave and took on one rank; empty on ranks that had no part in it."""

    name: str
    tokens: list[int] | None = None
    prefill_s: float | None = None
    step_s: list[float] | None = None
    """Of every new token; the first one's is that of the prompt's last token."""
    sent_bytes: float | None = None
    node_bytes: float | None = None
    cache_bytes: int | None = None
    memory_bytes: int | None = None
    error: float | None = None
    logits: list[Tensor] | None = None


class Row(NamedTuple):
    """One contender in one case: a line of results.csv. Empty is what does not apply."""

    machines: str
    ranks: int
    model: str
    prompt_tokens: int
    new_tokens: int
    cache: str
    schedule: str
    prefill_ms: float | None
    first_token_ms: float | None
    """From the prompt to the first new token: the prefill, which all schedules share, and one step."""
    token_ms: float
    """Median over the further tokens of the slowest rank's time."""
    p10_ms: float
    p90_ms: float
    tokens_per_s: float
    ratio: float
    """token_ms divided by that of `auto`, or of the first schedule."""
    sent_bytes: int
    """Payload that a rank sends for one token, mean over the ranks."""
    node_bytes: int | None
    """What a node's interface to the network sent for one token, headers included, mean over the ranks."""
    cache_bytes: int
    """Keys and values that a rank holds, the largest of the ranks."""
    memory_bytes: int | None
    """Most memory of a rank above what was resident before decoding, the largest of the ranks."""
    error: float
    """Largest difference of a logit from the plain model's, as a share of the largest one."""


def rows_of(case, found: list[list[Outcome]]) -> list[Row]:
    """Rows of all contenders of a case from what the ranks found."""
    rows = []
    for of_ranks in zip(*found):
        took = [o for o in of_ranks if o.tokens is not None]
        steps = [1e3 * max(s) for s in zip(*(o.step_s for o in took))]
        later = sorted(steps[1:])
        prefill = None if took[0].prefill_s is None else 1e3 * took[0].prefill_s
        median = statistics.median(later)
        rows.append(
            Row(
                machines=case.machines.label,
                ranks=case.machines.ranks,
                model=case.model,
                prompt_tokens=case.seq_len,
                new_tokens=case.new_tokens,
                cache=case.cache,
                schedule=took[0].name,
                prefill_ms=prefill,
                first_token_ms=None if prefill is None else prefill + steps[0],
                token_ms=median,
                p10_ms=later[round((len(later) - 1) * 0.1)],
                p90_ms=later[round((len(later) - 1) * 0.9)],
                tokens_per_s=1e3 / median,
                ratio=0.0,
                sent_bytes=round(statistics.mean(o.sent_bytes for o in took)),
                node_bytes=None if took[0].node_bytes is None else round(statistics.mean(o.node_bytes for o in took)),
                cache_bytes=max(o.cache_bytes for o in took),
                memory_bytes=max((o.memory_bytes for o in took if o.memory_bytes is not None), default=None),
                error=took[0].error,
            )
        )
    base = next((r for r in rows if r.schedule == "auto"), rows[1]).token_ms
    return [r._replace(ratio=r.token_ms / base) for r in rows]


COLUMNS = (
    ("first token s", 13, lambda r: "" if r.first_token_ms is None else f"{r.first_token_ms / 1e3:.3g}"),
    ("ms/token", 9, lambda r: f"{r.token_ms:.3g}" if r.token_ms < 1000 else f"{r.token_ms:.0f}"),
    ("p10", 8, lambda r: f"{r.p10_ms:.3g}" if r.p10_ms < 1000 else f"{r.p10_ms:.0f}"),
    ("p90", 8, lambda r: f"{r.p90_ms:.3g}" if r.p90_ms < 1000 else f"{r.p90_ms:.0f}"),
    ("tokens/s", 8, lambda r: f"{r.tokens_per_s:.3g}"),
    ("sent/rank", 10, lambda r: _size(r.sent_bytes)),
    ("sent/node", 10, lambda r: _size(r.node_bytes)),
    ("cache", 9, lambda r: _size(r.cache_bytes)),
    ("memory", 9, lambda r: _size(r.memory_bytes)),
)


def table(label: str, rows: list[Row]) -> str:
    """The rows of one case for people."""
    width = max(len(r.schedule) for r in rows)
    lines = [
        f"\n{label}",
        "  all ranks of all contenders gave the plain model's tokens; logits differ by at most "
        f"{max(r.error for r in rows):.2g} of the largest one",
        "  " + " " * width + "  x auto " + " ".join(f"{name:>{w}}" for name, w, _ in COLUMNS),
    ]
    for r in rows:
        cells = " ".join(f"{show(r):>{w}}" for _, w, show in COLUMNS)
        lines.append(f"  {r.schedule:<{width}} {r.ratio:7.3g} {cells}")
    return "\n".join(lines) + "\n  bytes are those of one new token; memory is beyond what was held before decoding"


def _size(n: float | None) -> str:
    return "" if n is None else size(n)


METRICS = (
    ("time of a token (ms)", lambda r: r.token_ms),
    ("payload sent by a rank for a token (MB)", lambda r: r.sent_bytes / 1e6),
    ("cache of a rank and memory of decoding (MB)", lambda r: (r.cache_bytes + (r.memory_bytes or 0)) / 1e6),
)


def plots(rows: list[Row], title: str) -> dict[str, Callable[[pathlib.Path], None]]:
    """What to draw, by file name."""
    return {"results.png": functools.partial(_draw, rows, title)}


def _draw(rows: list[Row], title: str, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(METRICS), figsize=(13, 4.2))
    names = dict.fromkeys(r.schedule for r in rows)
    lengths = sorted({r.prompt_tokens for r in rows})
    markers = itertools.cycle("os^vD")
    for name in names:
        style = dict(color=COLOURS.get(name, "tab:green"), marker=next(markers), linewidth=2 if name == "auto" else 1.2)
        mine = sorted((r for r in rows if r.schedule == name), key=lambda r: r.prompt_tokens)
        for ax, (_, metric) in zip(axes, METRICS):
            points = [(r.prompt_tokens, metric(r)) for r in mine if metric(r)]
            if points:
                ax.plot(*zip(*points), label="plain, one rank" if name == "plain" else name, **style)
    for ax, (label, _) in zip(axes, METRICS):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
        ax.set_xlabel("tokens in the prompt", fontsize=8)
        ax.set_ylabel(label, fontsize=8)
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=8)
    save(figure, path, dpi=80)
