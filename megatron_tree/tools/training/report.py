"""The output of a run: a few lines, a JSON-lines log, and a plot of the loss."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from ...core.files import append, read_json, whole_file, writing

LINES_PER_RUN = 10
LOG_NAME = "train.jsonl"
PLOT_NAME = "loss.png"


class Reporter:
    """Lines and log of one run on rank 0; silent on the others.

    Args:
        args: options; output_dir, save and train_iters are used.
        first_step: of this run, from 1. A resumed run continues the log; the steps that it repeats are replaced.
        enabled: False on all ranks but one.
    Raises: ValueError where another run writes to the log, or to the folder of checkpoints.
    """

    def __init__(self, args: argparse.Namespace, *, first_step: int, enabled: bool):
        self._enabled = enabled
        if not enabled:
            return
        self._folder, self._last = Path(args.output_dir), args.train_iters
        log = self._log = self._folder / LOG_NAME
        with writing(log):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._save = None if args.save is None else _open_folder(Path(args.save))
        former = _open_alone(log)
        earlier = read_log(log) if first_step > 1 else []
        with whole_file(log) as part:
            part.write_text("".join(json.dumps(r) + "\n" for r in earlier if r.get("step", 0) < first_step))
        with former:
            self._file = _open_alone(log)
        self._ends = (first_step, self._last)
        self._interval = max(1, (self._last - first_step + 1) // LINES_PER_RUN)

    def event(self, name: str, **facts: Any) -> None:
        """Log something other than a step."""
        if self._enabled:
            self._write({"event": name, **facts})

    def step(self, step: int, **values: float | None) -> None:
        """Log one training step: loss, grad_norm (or None), lr, tokens_per_s, seconds."""
        if not self._enabled:
            return
        self._write({"step": step, **values})
        if step % self._interval == 0 or step in self._ends:
            norm = "" if values["grad_norm"] is None else f"  grad norm {values['grad_norm']:.2f}"
            line = f"step {step:>{len(str(self._last))}}/{self._last}  loss {values['loss']:.4f}{norm}"
            self.say(f"{line}  lr {values['lr']:.2e}  {values['tokens_per_s']:,.0f} tokens/s")

    def _write(self, record: dict[str, Any]) -> None:
        append(self._file.fileno(), json.dumps(record).encode() + b"\n", self._log)

    def say(self, text: str) -> None:
        if self._enabled:
            print(text, flush=True)

    def close(self) -> None:
        """Close the log and draw the loss curve, if matplotlib is there."""
        if not self._enabled:
            return
        self._file.close()
        if self._save is not None:
            os.close(self._save)
        if importlib.util.find_spec("matplotlib") is None:
            self.say(f"no {PLOT_NAME}: matplotlib is not installed")
        else:
            draw_losses(read_log(self._log), self._folder / PLOT_NAME)


def _locked(option: str, folder: Path, file: int) -> int:
    """The file, of an option's folder, locked while it is open. Raises: ValueError where another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ValueError(f"{option} {str(folder)!r} is being written to by another run: name another") from None
    except OSError:  # a file system without locks
        pass
    return file


def _open_alone(log: Path) -> BinaryIO:
    """The log, to append to it; locked while it is open."""
    with writing(log):
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        return open(_locked("--output-dir", log.parent, file), "ab", buffering=0)


def _open_folder(folder: Path) -> int:
    """The folder of checkpoints; locked while it is open."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder, os.O_RDONLY)
    return _locked("--save", folder, file)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a train.jsonl. Other lines, such as an incomplete one after a crash, are ignored."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            record = read_json(line)
            if isinstance(record, dict) and all(isinstance(record.get(n, 0), (int, float)) for n in ("step", "loss")):
                records.append(record)
    return records


def draw_losses(records: list[dict[str, Any]], picture: Path) -> None:
    """Plot the losses over steps, and the unigram model's loss as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    points = [(r["step"], r["loss"]) for r in records if {"step", "loss"} <= r.keys()]
    if points:
        axes.plot(*zip(*points, strict=True), linewidth=1.2, label="training")
    start = next((r for r in reversed(records) if r.get("event") == "start"), {})
    if "unigram_loss" in start:
        axes.axhline(start["unigram_loss"], color="grey", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(0, None), title=start.get("title", ""))
    axes.legend()
    with whole_file(picture) as part:
        figure.savefig(part, format="png", dpi=120)
    pyplot.close(figure)
