"""What a soak records while it runs; `checks` judges it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Sample(NamedTuple):
    """Counts of one process at one time, from /proc; sizes in bytes."""

    at_s: float
    """Since the soak began."""
    incarnation: int
    who: str
    """A rank's number, or "parent"."""
    rss: int
    anonymous: int
    """Memory not backed by files: heaps and stacks."""
    fds: int
    threads: int
    ports: int
    """Listening TCP ports in the process's node."""


class Survivor(NamedTuple):
    """How a rank ended after another one was lost."""

    rank: int
    seconds: float | None
    """From the signal to its end; None: the soak had to end it."""
    status: int | None
    said: str
    """Its last error message."""


class Kill(NamedTuple):
    """The loss of a rank, caused by the soak."""

    at_s: float
    rank: int
    signal: str
    during: str
    """Innermost function of most survivors' tracebacks, or ""."""
    survivors: list[Survivor]


class Incarnation(NamedTuple):
    """One run of all ranks, from start to end."""

    number: int
    work: str
    round: int
    began_s: float
    ready_s: float | None
    """When its first result came."""
    ended_s: float
    expected_first: int
    """Steps or answers of the round that earlier incarnations left on disk."""
    first: int | None
    """Steps or answers that this one resumed after; None: it ended before."""
    last: int
    """Steps or answers of the round when it ended."""
    finished: bool
    kill: Kill | None
    failed: str
    """A failure that the soak did not cause, or ""."""
    left: list[str]
    """Processes, ports and shared memory that remained after all its ranks had ended."""


class Answer(NamedTuple):
    """The answer to one prompt."""

    id: int
    tokens: list[list[int]]
    logprobs: list[list[float]]


@dataclass
class Record:
    """The input of `checks`."""

    limit_s: float
    """Time limit of every wait for other ranks."""
    save_interval: int
    losses: dict[str, float] = field(default_factory=dict)
    """Of the undisturbed round, by step, and "valid"."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Of the undisturbed round, by id."""
    seen_losses: list[tuple[int, str, float]] = field(default_factory=list)
    """(incarnation, step, loss) of every step of every incarnation."""
    seen_answers: list[tuple[int, Answer]] = field(default_factory=list)
    """(round, answer) of every finished round."""
    incarnations: list[Incarnation] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes and files that remained after the end of the soak."""
    step_times: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds since the soak began, incarnation, step) of training steps, for the plot."""
