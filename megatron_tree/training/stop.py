"""A graceful stop: a signal to any rank ends the run on all of them, after the step that is under way."""

from __future__ import annotations

import signal
from types import TracebackType

STOPPING = (signal.SIGTERM, signal.SIGUSR1)  # schedulers send either; Slurm: --signal=USR1@120


class StopRequest:
    """A context in which SIGTERM and SIGUSR1 only leave a note. The training loop reads it and lets ranks agree.

    Ranks never act on the note alone: it travels with the sum of the losses, so all of them stop after the same step.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first that reached this rank."""

    def __enter__(self) -> StopRequest:
        self._former = {number: signal.signal(number, self._note) for number in STOPPING}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
