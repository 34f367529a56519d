"""The rows of `bench generate`: how they are made from the ranks' outcomes, printed and drawn."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .figures import draw_sweep
from .results import Plots, num_bytes, percentiles, table


@dataclass
class Outcome:
    """One rank's outcome of one contender; empty on ranks that did not take part."""

    name: str
    tokens: list[int] | None = None
    prefill_s: float | None = None
    step_s: list[float] | None = None
    """Of every new token; the first step runs the prompt's last token."""
    sent_bytes: float | None = None
    node_bytes: float | None = None
    cache_bytes: int | None = None
    memory_bytes: int | None = None
    error: float | None = None
    logits: list[Tensor] | None = None


class Generated(NamedTuple):
    """One contender in one case: a line of results.csv. None: does not apply."""

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
    """What a node's network interface sent for one token, headers included, mean over the ranks."""
    cache_bytes: int
    """Keys and values of a rank, maximum over the ranks."""
    memory_bytes: int | None
    """A rank's peak memory above what was resident before decoding, maximum over the ranks."""
    error: float
    """Largest difference of a logit from the plain model's, as a fraction of the largest logit."""


def rows_of(case, found: list[list[Outcome]]) -> list[Generated]:
    """Rows of all contenders of a case from the outcomes of all ranks."""
    rows = []
    for of_ranks in zip(*found):
        took_part = [o for o in of_ranks if o.tokens is not None]
        first, *later = [1e3 * max(s) for s in zip(*(o.step_s for o in took_part))]
        times, one = percentiles(later), took_part[0]
        prefill = None if one.prefill_s is None else 1e3 * one.prefill_s
        rows.append(
            Generated(
                machines=case.machines.label,
                ranks=case.machines.ranks,
                model=case.model,
                prompt_tokens=case.seq_len,
                new_tokens=case.new_tokens,
                cache=case.cache,
                schedule=one.name,
                prefill_ms=prefill,
                first_token_ms=None if prefill is None else prefill + first,
                token_ms=times[50],
                p10_ms=times[10],
                p90_ms=times[90],
                tokens_per_s=1e3 / times[50],
                ratio=0.0,
                sent_bytes=round(statistics.mean(o.sent_bytes for o in took_part)),
                node_bytes=None if one.node_bytes is None else round(statistics.mean(o.node_bytes for o in took_part)),
                cache_bytes=max(o.cache_bytes for o in took_part),
                memory_bytes=max((o.memory_bytes for o in took_part if o.memory_bytes is not None), default=None),
                error=one.error,
            )
        )
    base = next((r for r in rows if r.schedule == "auto"), rows[1]).token_ms
    return [r._replace(ratio=r.token_ms / base) for r in rows]


COLUMNS = (
    ("x auto", 7, lambda r: r.ratio),
    ("first token s", 13, lambda r: r.first_token_ms and f"{r.first_token_ms / 1e3:.3g}"),
    ("ms/token", 9, lambda r: r.token_ms),
    ("p10", 8, lambda r: r.p10_ms),
    ("p90", 8, lambda r: r.p90_ms),
    ("tokens/s", 8, lambda r: r.tokens_per_s),
    ("sent/rank", 10, lambda r: num_bytes(r.sent_bytes)),
    ("sent/node", 10, lambda r: num_bytes(r.node_bytes)),
    ("cache", 9, lambda r: num_bytes(r.cache_bytes)),
    ("memory", 9, lambda r: num_bytes(r.memory_bytes)),
)


def table_of(label: str, rows: list[Generated]) -> str:
    """The table of one case."""
    return "\n".join(
        [
            f"\n{label}",
            "  all ranks of all contenders gave the plain model's tokens; logits differ by at most "
            f"{max(r.error for r in rows):.2g} of the largest one",
            *table([r.schedule for r in rows], rows, COLUMNS),
            "  bytes are per new token; memory is beyond what was held before decoding",
        ]
    )


METRICS = (
    ("time of a token (ms)", lambda r: (r.token_ms, None)),
    ("payload sent by a rank for a token (MB)", lambda r: (r.sent_bytes / 1e6, None)),
    ("cache of a rank and memory of decoding (MB)", lambda r: ((r.cache_bytes + (r.memory_bytes or 0)) / 1e6, None)),
)


def plots(rows: list[Generated], title: str) -> Plots:
    """One figure over the lengths of the prompts; "plain" is one rank."""
    groups = {f"{rows[0].machines} ranks; plain: one rank": rows}
    return {
        "results.png": functools.partial(draw_sweep, groups=groups, x="prompt_tokens", metrics=METRICS, title=title)
    }
