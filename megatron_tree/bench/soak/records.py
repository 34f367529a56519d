"""What a soak writes down while it runs; `checks` judges it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Sample(NamedTuple):
    """One look at one process, from the kernel's counts; sizes in bytes."""

    at_s: float
    """Since the soak began."""
    incarnation: int
    who: str
    """A rank's number, or "parent"."""
    rss: int
    anonymous: int
    """Memory that is no file's: heaps and stacks."""
    pss: int
    """The same, each page divided by the number of processes that share it since their fork. (Files' pages are shared
    with whatever else runs on the machine: they would say nothing about the soak.)"""
    fds: int
    threads: int
    ports: int
    """TCP ports that are listened on in the process's node."""


class Survivor(NamedTuple):
    """How a rank took the loss of another one."""

    rank: int
    seconds: float | None
    """From the signal to its end; None: it had to be ended."""
    status: int | None
    said: str
    """The error it ended with."""


class Kill(NamedTuple):
    """A rank was taken out."""

    at_s: float
    rank: int
    signal: str
    during: str
    """Where the program was: the innermost functions of a survivor, or "" where none was told."""
    survivors: list[Survivor]


class Incarnation(NamedTuple):
    """One start of all ranks with its end."""

    number: int
    work: str
    round: int
    began_s: float
    ready_s: float | None
    """When its first result came."""
    ended_s: float
    expected_first: int
    """Steps or answers that earlier incarnations of the round had on the disk."""
    first: int | None
    """Those that this one says it continues from; None: it did not come so far."""
    last: int
    """What it had done when it ended."""
    finished: bool
    kill: Kill | None
    failed: str
    """What went wrong without our doing; "" for nothing."""
    left: list[str]
    """Processes, ports and shared memory that were there when all its ranks had ended."""


class Answer(NamedTuple):
    """A line of the results of a file of prompts."""

    id: int
    tokens: list[list[int]]
    logprobs: list[list[float]]


@dataclass
class Record:
    """Everything that `checks` looks at."""

    limit_s: float
    """Time limit of every wait for other ranks."""
    save_interval: int
    losses: dict[str, float] = field(default_factory=dict)
    """Of the undisturbed run, by step, and "valid"."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Of the undisturbed run, by id."""
    seen_losses: list[tuple[int, str, float]] = field(default_factory=list)
    """(incarnation, step, loss) of every step that any incarnation did."""
    seen_answers: list[tuple[int, Answer]] = field(default_factory=list)
    """(round, answer) of every line of every round that was finished."""
    incarnations: list[Incarnation] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What was there after the end of everything."""
    step_times: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds since the soak began, incarnation, step) of training steps, for the plot."""
