"""What this rank sends, for tests and benchmarks that count it."""

from __future__ import annotations

import contextlib
from typing import NamedTuple


class Sent(NamedTuple):
    """One operation of this rank: its name, the ranks that take part, and the payload bytes this rank sends."""

    op: str
    ranks: int
    bytes: int


recorders: list[list[Sent]] = []
"""The open records."""


@contextlib.contextmanager
def record():
    """A list that fills with every operation of this rank while the context is open."""
    log: list[Sent] = []
    recorders.append(log)
    try:
        yield log
    finally:
        recorders.remove(log)


def note(op: str, ranks: int, num_bytes: int) -> None:
    """Add an operation to the open records."""
    for log in recorders:
        log.append(Sent(op, ranks, num_bytes))
