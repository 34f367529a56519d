"""What a run tells: a progress bar or a few lines, a JSON-lines log, TensorBoard curves, and a picture of the loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..files import read_json

LINES_PER_RUN = 10
LOG_NAME = "train.jsonl"
PLOT_NAME = "loss.png"
FINAL_STEPS = 10
TENSORBOARD_NAMES = {  # Megatron-LM's, where it has the same curve
    "loss": "lm loss",
    "grad_norm": "grad-norm",
    "lr": "learning-rate",
    "seconds": "iteration-time",
    "tokens_per_s": "tokens-per-second",
}


class Reporter:
    """Progress and log of one run, on rank 0; silent on the others.

    Args:
        folder: gets train.jsonl and loss.png. A resumed run appends to the log.
        first_step, last_step: the steps this run will do, inclusive.
        unigram: loss of the byte unigram model, nats per token; None if it is not known.
        log_interval: steps between printed lines; 0 means ten lines a run, or on a terminal only the progress bar.
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
        self._log_interval, self._file, self._tensorboard = log_interval, None, None
        if not enabled:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if first_step > 1:
            _end_line(self.folder / LOG_NAME)
        self._file = (self.folder / LOG_NAME).open("a" if first_step > 1 else "w")
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(tensorboard_dir, purge_step=first_step)
        self._terminal = sys.stdout.isatty()
        steps = {"total": last_step, "initial": first_step - 1, "unit": "step"}
        self._bar = tqdm(**steps, file=sys.stdout, dynamic_ncols=True, disable=not self._terminal)

    def header(self, **facts: Any) -> None:
        """Log what the run is: options, versions, sizes."""
        self._write({"event": "start", "first_step": self.first_step, "unigram_loss": self.unigram, **facts})

    def step(self, step: int, *, loss: float, grad_norm: float | None, lr: float, tokens_per_s: float, seconds: float):
        """Log one training step."""
        self.losses[step] = loss
        if not self.enabled:
            return
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_per_s": tokens_per_s, "seconds": seconds}
        self._write({"step": step, **values})
        self._draw(step, {TENSORBOARD_NAMES[name]: value for name, value in values.items()})
        self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
        self._bar.update()
        if self._line_due(step):
            norm = "" if grad_norm is None else f"  grad norm {grad_norm:.2f}"
            number = f"{step:>{len(str(self.last_step))}}/{self.last_step}"
            self.say(f"step {number}  loss {loss:.4f}{norm}  lr {lr:.2e}  {tokens_per_s:,.0f} tokens/s")

    def _line_due(self, step: int) -> bool:
        if self._log_interval:
            return step % self._log_interval == 0
        every = max(1, (self.last_step - self.first_step + 1) // LINES_PER_RUN)
        return not self._terminal and (step % every == 0 or step in (self.first_step, self.last_step))

    def validation(self, step: int, loss: float) -> None:
        """Log a validation."""
        if self.enabled:
            self._write({"event": "validation", "step": step, "loss": loss})
            self._draw(step, {"lm loss validation": loss})
            self.say(f"step {step}: validation loss {loss:.4f}")

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.enabled:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def final_loss(self) -> float:
        """Mean loss of the last ten steps (fewer in a shorter run)."""
        last = list(self.losses.values())[-FINAL_STEPS:]
        return sum(last) / len(last)

    def close(self) -> None:
        """Draw the loss curve and close the log."""
        if not self.enabled:
            return
        self._bar.close()
        self._write({"event": "end", "final_loss": self.final_loss(), "unigram_loss": self.unigram})
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        draw_losses(self.folder / LOG_NAME, self.folder / PLOT_NAME)

    def _draw(self, step: int, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            if self._tensorboard is not None and value is not None:
                self._tensorboard.add_scalar(name, value, step)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """All records of a train.jsonl: its events, then its steps. Of a step that a resumed run repeated the later record
    counts. Lines that are not records, such as an incomplete one after a crash, are ignored."""
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
    """End the incomplete line that a crash may have left."""
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
    if start.get("unigram_loss") is not None:
        axes.axhline(start["unigram_loss"], color="grey", linestyle="--", label="byte unigram entropy")
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(0, None), title=start.get("title", ""))
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
