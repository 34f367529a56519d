"""What megatron-tree generate prints: progress of the prefill, and tables of the cache and of the times."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from ..generation.speculation import Speculated

LOG_INTERVAL_S = 10.0  # between lines of progress in a log file


def progress_bar(what: str) -> Callable[[int, int], None]:
    """Called as show(done, total), shows progress on stderr: a bar on a terminal, elsewhere a line now and then."""
    bar = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            style = {"dynamic_ncols": True, "leave": False}
            if not sys.stderr.isatty():
                style = {"bar_format": "{desc}: {n_fmt} of {total_fmt}", "mininterval": LOG_INTERVAL_S}
            bar = tqdm(desc=what, total=total, file=sys.stderr, **style)
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


def memory_table(ranks: list[dict[str, Any]], model_bytes: int) -> str:
    """What every rank holds of the cache and of a model of model_bytes; `ranks` has one entry for each rank."""
    whole = sum(r["cache_bytes"] for r in ranks)
    lines = [
        f"{'rank':>6} {'cached tokens':>14} {'cache bytes':>14} {'of the whole':>13} {'weight bytes':>15} "
        f"{'of the whole':>13}"
    ]
    for r in ranks:
        lines.append(
            f"{r['rank']:>6} {r['cached_tokens']:>14,} {r['cache_bytes']:>14,} {r['cache_bytes'] / whole:>12.1%} "
            f"{r['weight_bytes']:>15,} {r['weight_bytes'] / model_bytes:>13.1%}"
        )
    return "\n".join(lines)


def time_table(figures: dict[str, Any]) -> str:
    """The times of one generation; `figures` as from `time_figures`."""
    steps, speculation = figures["new_tokens"] - 1, figures.get("speculation")
    prompt, seconds = figures["prompt_tokens"], figures["prefill_s"]
    lines = [
        f"prompt               {prompt:,} tokens",
        f"prefill              {seconds:.2f} s ({prompt / seconds:,.0f} tokens/s)",
        f"time to first token  {figures['first_token_s']:.2f} s",
    ]
    if steps:
        median, longest = 1e3 * figures["token_median_s"], 1e3 * figures["token_max_s"]
        lines.append(
            f"per token            {median:.1f} ms median, {longest:.1f} ms at most "
            f"({speculation['steps'] if speculation else steps} steps)"
        )
    if speculation:
        lines.append(f"speculation          {speculation_text(Speculated(**speculation))}")
    return "\n".join(lines)


def speculation_text(numbers: Speculated) -> str:
    """What speculation came to, in a line."""
    each = (numbers.steps + numbers.accepted) / max(numbers.steps, 1)
    return f"{numbers.accepted:,} of {numbers.drafted:,} drafted tokens were right, {each:.2f} tokens per step"


def time_figures(result) -> dict[str, Any]:
    """Sizes and times of an `Answer`, ready for JSON."""
    steps = result.step_s
    return {
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.tokens),
        "prefill_s": result.prefill_s,
        "first_token_s": result.first_token_s,
        "token_median_s": statistics.median(steps) if steps else None,
        "token_max_s": max(steps) if steps else None,
        "token_s": steps,
    }
