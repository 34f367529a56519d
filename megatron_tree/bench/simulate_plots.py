"""Plots of `bench simulate`."""

from __future__ import annotations

from pathlib import Path

from .plots import COLOURS, save

STYLES = {"KV gather": "kv_gather", "pure tree": "pure_tree"}
LABELS = {"ring": "ring", "allreduce": "tree: the paper's all-reduces", "auto": "tree: the planner's choice"}


def draw_latency(path: Path, rows) -> None:
    """Figure 3: relative to the ring at the shortest sequence, and in milliseconds at the longest."""
    figure, (left, right) = _figure(2)
    mine = [r for r in rows if r.part == "latency"]
    shortest, longest = min(r.seq_len for r in mine), max(r.seq_len for r in mine)
    widths = dict(zip(sorted({r.ranks for r in mine}), (0.8, 1.6, 2.4)))
    for (ranks, schedule), points in _curves(mine, ("ranks", "schedule")).items():
        base = next(r.time_s for r in mine if (r.ranks, r.schedule, r.seq_len) == (ranks, "ring", shortest))
        style = dict(color=COLOURS[schedule], linewidth=widths[ranks], label=f"{schedule}, {ranks} GPUs")
        left.plot([r.seq_len / 1e6 for r in points], [r.time_s / base for r in points], marker=".", **style)
    for (schedule,), points in _curves([r for r in mine if r.seq_len == longest], ("schedule",)).items():
        style = dict(color=COLOURS[schedule], marker="o", label=LABELS[schedule])
        right.plot([r.ranks for r in points], [r.time_s * 1e3 for r in points], **style)
    _finish(left, "tokens, millions", f"time relative to the ring at {shortest // 1000}k tokens")
    _finish(right, "GPUs", f"ms per decode step at {longest / 1e6:g}M tokens")
    figure.suptitle(
        "Simulated: one decode step, 16 heads of 128, DGX H100 nodes (compare figure 3 of the paper)", fontsize=9
    )
    save(figure, path, dpi=90)


def draw_memory(path: Path, rows) -> None:
    """Figure 4: what a rank holds, beside the paper's formulas."""
    figure, axes = _figure(2)
    for ax, ((case,), mine) in zip(axes, _curves([r for r in rows if r.part == "memory"], ("case",)).items()):
        for (schedule,), points in _curves(mine, ("schedule",)).items():
            xs = [r.seq_len / 1e3 for r in points]
            style = dict(color=COLOURS[schedule])
            ax.plot(xs, [r.memory_bytes / 1e6 for r in points], marker=".", label=LABELS[schedule], **style)
            if points[0].published:
                label = f"the paper's formula for the {'ring' if schedule == 'ring' else 'tree'}"
                ax.plot(xs, [r.published / 1e6 for r in points], "o", mfc="none", markersize=9, label=label, **style)
        _finish(ax, "tokens, thousands", f"MB on a GPU, {case}", "linear")
    figure.suptitle(
        "Simulated: shard and buffers of one decode step, two RTX 4090 (compare figure 4 of the paper)", fontsize=9
    )
    save(figure, path, dpi=90)


def draw_scale(path: Path, rows) -> None:
    """Decode and training at 10M tokens on ever more ranks."""
    figure, axes = _figure(3)
    mine = [r for r in rows if r.part == "decode"]
    for (schedule,), points in _curves(mine, ("schedule",)).items():
        style = dict(color=COLOURS[schedule], label=schedule, linewidth=2 if schedule == "auto" else 1.2)
        axes[0].plot([r.ranks for r in points], [r.time_s * 1e3 for r in points], marker=".", **style)
    _finish(axes[0], "ranks", "ms per decode step, GQA 4:1")
    training = [r for r in rows if r.part == "training"]
    for (schedule,), points in _curves([r for r in training if r.case == "MHA"], ("schedule",)).items():
        style = dict(color=COLOURS[STYLES.get(schedule, schedule)], label=schedule)
        axes[1].plot([r.ranks for r in points], [r.time_s for r in points], marker=".", **style)
    _finish(axes[1], "ranks", "s of one attention, forward and backward, MHA")
    ring = {(r.case, r.ranks): r.sent_bytes for r in training if r.schedule == "ring"}
    for (case,), points in _curves([r for r in training if r.schedule == "auto"], ("case",)).items():
        axes[2].plot(
            [r.ranks for r in points], [r.sent_bytes / ring[case, r.ranks] for r in points], marker=".", label=case
        )
    axes[2].set_ylim(bottom=0)
    _finish(axes[2], "ranks", "bytes of the planner's grid / the ring's", "linear")
    tokens = training[0].seq_len >> 20
    figure.suptitle(f"Simulated: {tokens}M tokens on {training[0].topology}, head_dim 128, bf16", fontsize=9)
    save(figure, path, dpi=90)


def _curves(rows, keys: tuple[str, ...]) -> dict[tuple, list]:
    found: dict[tuple, list] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, key) for key in keys), []).append(row)
    return found


def _figure(panels: int):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, panels, figsize=(5.2 * panels, 4.4))


def _finish(ax, xlabel: str, ylabel: str, yscale: str = "log") -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale(yscale)
    xs = sorted({x for line in ax.lines for x in line.get_xdata()})
    ax.set_xticks(xs, [f"{x:g}" for x in xs], fontsize=7)
    ax.minorticks_off()
    ax.set_xlabel(xlabel, fontsize=8)
    ax.set_ylabel(ylabel, fontsize=8)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
