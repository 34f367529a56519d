"""The output of a run: a progress bar or a few lines, a JSON-lines log, TensorBoard curves, and a plot of the loss."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..files import read_json

LINES_PER_RUN = 10
LOG_NAME = "train.jsonl"
PLOT_NAME = "loss.png"
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
        args: options; output_dir, tensorboard_dir, log_interval and train_iters are used.
        first_step: of this run, from 1. A resumed run appends to the log.
        enabled: False on all ranks but one.
    """

    def __init__(self, args: argparse.Namespace, *, first_step: int, enabled: bool):
        self._enabled, self._tensorboard = enabled, None
        if not enabled:
            return
        self._folder, self._last = Path(args.output_dir), args.train_iters
        self._folder.mkdir(parents=True, exist_ok=True)
        if first_step > 1:
            _end_line(self._folder / LOG_NAME)
        self._file = (self._folder / LOG_NAME).open("a" if first_step > 1 else "w", buffering=1)
        if args.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(args.tensorboard_dir, purge_step=first_step)
        bar = sys.stdout.isatty()
        self._bar = tqdm(
            total=self._last, initial=first_step - 1, unit="step", file=sys.stdout, dynamic_ncols=True, disable=not bar
        )
        self._ends = () if args.log_interval or bar else (first_step, self._last)
        usual = self._last + 1 if bar else max(1, (self._last - first_step + 1) // LINES_PER_RUN)
        self._interval = args.log_interval or usual

    def event(self, name: str, **facts: Any) -> None:
        """Log something other than a step."""
        if self._enabled:
            self._file.write(json.dumps({"event": name, **facts}) + "\n")

    def step(self, step: int, **values: float | None) -> None:
        """Log one training step: loss, grad_norm (or None), lr, tokens_per_s, seconds."""
        if not self._enabled:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._draw(step, {TENSORBOARD_NAMES[name]: value for name, value in values.items()})
        speed = f"{values['tokens_per_s']:,.0f} tokens/s"
        self._bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed}", refresh=False)
        self._bar.update()
        if step % self._interval == 0 or step in self._ends:
            norm = "" if values["grad_norm"] is None else f"  grad norm {values['grad_norm']:.2f}"
            place = f"step {step:>{len(str(self._last))}}/{self._last}"
            self.say(f"{place}  loss {values['loss']:.4f}{norm}  lr {values['lr']:.2e}  {speed}")

    def validation(self, step: int, loss: float) -> None:
        """Log a validation."""
        self.event("validation", step=step, loss=loss)
        self._draw(step, {"lm loss validation": loss})
        self.say(f"step {step}: validation loss {loss:.4f}")

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._enabled:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Close the log and draw the loss curve."""
        if self._enabled:
            self._bar.close()
            self._file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()
            draw_losses(self._folder / LOG_NAME, self._folder / PLOT_NAME)

    def _draw(self, step: int, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            if self._tensorboard is not None and value is not None:
                self._tensorboard.add_scalar(name, value, step)


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
