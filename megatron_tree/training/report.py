"""What a run tells: a progress bar or a few lines, a JSON-lines log, TensorBoard curves, and a picture of the loss."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..files import read_json

LINES_PER_RUN = 10
LOG_NAME = "train.jsonl"
PLOT_NAME = "loss.png"
FINAL_STEPS = 10
# Where Megatron-LM has the same curve, by its name.
TENSORBOARD_NAMES = {
    "loss": "lm loss",
    "grad_norm": "grad-norm",
    "lr": "learning-rate",
    "loss_scale": "loss-scale",
    "tflops": "throughput",
    "seconds": "iteration-time",
    "tokens_per_s": "tokens-per-second",
    "mfu": "mfu",
    "memory_gib": "memory-gib",
}


class Reporter:
    """Progress and log of one run, on rank 0; silent on the others.

    Args:
        folder: gets train.jsonl and loss.png. A resumed run appends to the log.
        first_step, last_step: the steps this run will do, inclusive.
        unigram: loss of the byte unigram model, nats per token; None if it is not known.
        log_interval: steps between printed lines; 0 means ten lines a run, and where the output is a terminal only
            the bar.
        tensorboard_dir: gets TensorBoard's event files, None means none.
        enabled: False on all ranks but one.
    """

    def __init__(
        self,
        folder: str,
        *,
        first_step: int,
        last_step: int,
        unigram: float | None,
        log_interval: int,
        tensorboard_dir: str | None = None,
        enabled: bool,
    ):
        self.folder, self.unigram, self.enabled = Path(folder), unigram, enabled
        self.first_step, self.last_step = first_step, last_step
        self.losses: dict[int, float] = {}
        self._log_interval = log_interval
        self._bar = self._file = self._tensorboard = None
        self._started = time.monotonic()
        if not enabled:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if first_step > 1:
            _end_line(self.folder / LOG_NAME)
        self._file = (self.folder / LOG_NAME).open("a" if first_step > 1 else "w")
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(tensorboard_dir, purge_step=first_step)
        if sys.stdout.isatty():
            self._bar = tqdm(total=last_step, initial=first_step - 1, unit="step", file=sys.stdout, dynamic_ncols=True)

    def header(self, **facts: Any) -> None:
        """Log what the run is: options, versions, sizes."""
        self._write({"event": "start", "first_step": self.first_step, "unigram_loss": self.unigram, **facts})

    def step(
        self, step: int, *, loss: float, grad_norm: float | None, lr: float, tokens_per_s: float, **figures: float
    ) -> None:
        """Log one training step; `figures` are those of `throughput.Throughput` and others with names of their own."""
        self.losses[step] = loss
        if not self.enabled:
            return
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_per_s": tokens_per_s, **figures}
        self._write({"step": step, **values})
        self._draw(step, {name: values.get(key) for key, name in TENSORBOARD_NAMES.items()})
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            self._bar.update()
        if self._line_due(step):
            elapsed = time.monotonic() - self._started
            norm = "" if grad_norm is None else f"  grad norm {grad_norm:.2f}"
            mfu = f"  MFU {100 * figures['mfu']:.1f} %" if "mfu" in figures else ""
            skipped = f"  skipped: overflow at loss scale {figures['loss_scale']:g}" if figures.get("skipped") else ""
            self.say(
                f"step {step:>{len(str(self.last_step))}}/{self.last_step}  loss {loss:.4f}{norm}  lr {lr:.2e}"
                f"  {tokens_per_s:,.0f} tokens/s{mfu}  {elapsed:.0f} s{skipped}"
            )

    def _line_due(self, step: int) -> bool:
        if self._log_interval:
            return step % self._log_interval == 0
        every = max(1, (self.last_step - self.first_step + 1) // LINES_PER_RUN)
        return self._bar is None and (step % every == 0 or step in (self.first_step, self.last_step))

    def validation(self, step: int, loss: float) -> None:
        """Log a validation."""
        if self.enabled:
            self._write({"event": "validation", "step": step, "loss": loss})
            self._draw(step, {"lm loss validation": loss})
            self.say(f"step {step}: validation loss {loss:.4f}")

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.enabled:
            if self._bar is not None:
                self._bar.write(text, file=sys.stdout)
            else:
                print(text, flush=True)

    def final_loss(self) -> float:
        """Mean loss of the last ten steps (fewer in a shorter run)."""
        last = list(self.losses.values())[-FINAL_STEPS:]
        return sum(last) / len(last)

    def close(self) -> None:
        """Draw the loss curve and close the log."""
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.close()
        self._write({"event": "end", "final_loss": self.final_loss(), "unigram_loss": self.unigram})
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        draw_losses(self.folder / LOG_NAME, self.folder / PLOT_NAME)

    def _draw(self, step: int, values: dict[str, float | None]) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """All records of a train.jsonl; a step that a resumed run did again counts once, with its later values. Lines that
    are none, such as the half of one that a crash has left, don't count."""
    records = [record for line in Path(path).read_bytes().split(b"\n") if (record := _record(line))]
    steps = {record["step"]: record for record in records if "loss" in record and "event" not in record}
    return [record for record in records if "event" in record] + [steps[step] for step in sorted(steps)]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = read_json(line)
    except ValueError:
        return None
    numbers = isinstance(found, dict) and all(isinstance(found.get(name, 0), (int, float)) for name in ("step", "loss"))
    return found if numbers and ("step" in found or "event" in found) else None


def _end_line(path: Path) -> None:
    """What is appended must not go on with the half of a line that a crash has left."""
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        if file.read() not in (b"", b"\n"):
            file.write(b"\n")


def draw_losses(log: Path, picture: Path) -> None:
    """Plot training and validation losses over steps, and the byte unigram model's loss as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_log(log)
    training = [record for record in records if "event" not in record]
    validation = [record for record in records if record.get("event") == "validation"]
    start = next((record for record in reversed(records) if record.get("event") == "start"), {})
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([r["step"] for r in training], [r["loss"] for r in training], linewidth=1.2, label="training")
    if validation:
        axes.plot([r["step"] for r in validation], [r["loss"] for r in validation], "o", label="validation")
    unigram = start.get("unigram_loss")
    if unigram is not None:
        axes.axhline(unigram, color="grey", linestyle="--", label="byte unigram entropy")
    axes.set(
        xlabel="step",
        ylabel="loss, nats per token",
        ylim=(0, None),
        title=start.get("title", ""),
    )
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
