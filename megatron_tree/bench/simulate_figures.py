"""Figures of `bench simulate`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from .figures import COLOURS, figure, grouped, label

STYLES = {"KV gather": "kv_gather", "pure tree": "pure_tree"}
LABELS = {"ring": "ring", "allreduce": "tree: the paper's all-reduces", "auto": "tree: the planner's choice"}


def draw_latency(path: Path, points) -> None:
    """Figure 3: relative to the ring at the shortest sequence, and in milliseconds at the longest."""
    mine = [p for p in points if p.part == "latency"]
    shortest, longest = min(p.seq_len for p in mine), max(p.seq_len for p in mine)
    widths = dict(zip(sorted({p.ranks for p in mine}), (0.8, 1.6, 2.4)))
    title = "Simulated: one decode step, 16 heads of 128, DGX H100 nodes (compare figure 3 of the paper)"
    with _panels(path, 2, title) as (left, right):
        for (ranks, schedule), line in grouped(mine, lambda p: (p.ranks, p.schedule)).items():
            base = next(p.time_s for p in mine if (p.ranks, p.schedule, p.seq_len) == (ranks, "ring", shortest))
            style = dict(color=COLOURS[schedule], linewidth=widths[ranks], label=f"{schedule}, {ranks} GPUs")
            left.plot([p.seq_len / 1e6 for p in line], [p.time_s / base for p in line], marker=".", **style)
        for schedule, line in grouped((p for p in mine if p.seq_len == longest), lambda p: p.schedule).items():
            style = dict(color=COLOURS[schedule], marker="o", label=LABELS[schedule])
            right.plot([p.ranks for p in line], [p.time_s * 1e3 for p in line], **style)
        _finish(left, "tokens, millions", f"time relative to the ring at {shortest // 1000}k tokens")
        _finish(right, "GPUs", f"ms per decode step at {longest / 1e6:g}M tokens")


def draw_memory(path: Path, points) -> None:
    """Figure 4: what a rank holds, and the paper's formulas."""
    cases = grouped((p for p in points if p.part == "memory"), lambda p: p.case)
    title = "Simulated: shard and buffers of one decode step, two RTX 4090 (compare figure 4 of the paper)"
    with _panels(path, 2, title) as axes:
        for ax, (case, mine) in zip(axes, cases.items()):
            for schedule, line in grouped(mine, lambda p: p.schedule).items():
                xs, style = [p.seq_len / 1e3 for p in line], dict(color=COLOURS[schedule])
                ax.plot(xs, [p.memory_bytes / 1e6 for p in line], marker=".", label=LABELS[schedule], **style)
                if line[0].published:
                    style |= dict(label=f"the paper's formula for the {'ring' if schedule == 'ring' else 'tree'}")
                    ax.plot(xs, [p.published / 1e6 for p in line], "o", mfc="none", markersize=9, **style)
            _finish(ax, "tokens, thousands", f"MB on a GPU, {case}", "linear")


def draw_scale(path: Path, points) -> None:
    """Decode and training at 10M tokens on ever more ranks."""
    training = [p for p in points if p.part == "training"]
    title = f"Simulated: {training[0].seq_len >> 20}M tokens on {training[0].topology}, head_dim 128, bf16"
    with _panels(path, 3, title) as (decode, times, sent):
        for schedule, line in grouped((p for p in points if p.part == "decode"), lambda p: p.schedule).items():
            style = dict(color=COLOURS[schedule], label=schedule, linewidth=2 if schedule == "auto" else 1.2)
            decode.plot([p.ranks for p in line], [p.time_s * 1e3 for p in line], marker=".", **style)
        _finish(decode, "ranks", "ms per decode step, GQA 4:1")
        for schedule, line in grouped((p for p in training if p.case == "MHA"), lambda p: p.schedule).items():
            style = dict(color=COLOURS[STYLES.get(schedule, schedule)], label=schedule)
            times.plot([p.ranks for p in line], [p.time_s for p in line], marker=".", **style)
        _finish(times, "ranks", "s of one attention, forward and backward, MHA")
        ring = {(p.case, p.ranks): p.sent_bytes for p in training if p.schedule == "ring"}
        for case, line in grouped((p for p in training if p.schedule == "auto"), lambda p: p.case).items():
            ratios = [p.sent_bytes / ring[case, p.ranks] for p in line]
            sent.plot([p.ranks for p in line], ratios, marker=".", label=case)
        sent.set_ylim(bottom=0)
        _finish(sent, "ranks", "bytes of the planner's grid / the ring's", "linear")


@contextlib.contextmanager
def _panels(path: Path, columns: int, title: str):
    with figure(path, 1, columns, size=(5.2 * columns, 4.4), title=title) as axes:
        yield axes[0]


def _finish(ax, x: str, y: str, yscale: str = "log") -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale(yscale)
    ticks = sorted({n for line in ax.lines for n in line.get_xdata()})
    label(ax, x, y)
    ax.set_xticks(ticks, [f"{n:g}" for n in ticks], fontsize=7)
    ax.minorticks_off()
    ax.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
