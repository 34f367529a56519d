"""What the ranks are at, on standard error."""

from __future__ import annotations

import os
import time

from .runs import Case


class Progress:
    """One line that is written anew on a terminal, else a line for each schedule.

    Made before the ranks are forked: rank 0 writes, on a descriptor of its own, because what ranks print is kept back.
    """

    def __init__(self, total: int):
        self._total, self._done, self._begun = total, 0, time.monotonic()
        self._file = os.fdopen(os.dup(2), "w")
        self._terminal = self._file.isatty()

    def schedule(self, rank: int, case: Case, name: str) -> None:
        """A schedule begins on all ranks."""
        self._done += 1
        if rank == 0 and not self._terminal:
            self._write(f"{self._text(case, name)}\n")
        self.say(rank, case, f"{name}: first step, to be checked")

    def say(self, rank: int, case: Case, what: str) -> None:
        """What is being done, on terminals only."""
        if rank == 0 and self._terminal:
            self._write(f"\r\033[K{self._text(case, what)}")

    def line(self, text: str) -> None:
        """Something else that takes a while."""
        self._write(f"\r\033[K{text}" if self._terminal else f"{text}\n")

    def case_done(self, schedules: int) -> None:
        """In the process that forks the ranks: their counts end with them."""
        self._done += schedules
        if self._terminal:
            self._write("\r\033[K")

    def close(self) -> None:
        if self._terminal:
            self._write("\r\033[K")
        self._file.close()

    def _text(self, case: Case, what: str) -> str:
        spent = time.monotonic() - self._begun
        return f"[{self._done}/{self._total}, {spent:.0f} s] {case.machines.label}, {case.seq_len} tokens, {what}"

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
