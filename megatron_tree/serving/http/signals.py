"""Signals that ask a process to stop."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable

STOPPING = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """SIGTERM and SIGINT from now on. Handlers only take a note, since they may interrupt the holder of any lock."""

    def __init__(self):
        self._caught: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in STOPPING:
            signal.signal(number, lambda number, _: self._caught.put(number))

    @property
    def came(self) -> bool:
        """Whether there is one that nobody has taken."""
        return not self._caught.empty()

    def take(self) -> int:
        """The first of these, or the next one that comes."""
        return self._caught.get()

    def call(self, stop: Callable[[str], None]) -> None:
        """Call stop(the signal's name) in a thread of its own, for each signal that came and that comes."""

        def wait() -> None:
            while True:
                stop(signal.Signals(self.take()).name)

        threading.Thread(target=wait, name="signals", daemon=True).start()
