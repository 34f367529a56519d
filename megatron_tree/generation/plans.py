"""What the ranks do in a turn of continuous batching: a short list of operations that the leader sends to all ranks.

Rows are named by handles that the leader chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Add(NamedTuple):
    """A new, empty row."""

    handle: int


class Fork(NamedTuple):
    """A copy of a row."""

    handle: int
    copy: int


class Crop(NamedTuple):
    """Forget a row's tokens from position `length` on."""

    handle: int
    length: int


class Remove(NamedTuple):
    """Forget a row."""

    handle: int


class End(NamedTuple):
    """The answer in a kept row has ended; for those who follow it on other ranks."""

    handle: int
    token: int | None
    """Its last token, if no `Step` had it."""
    reason: str
    error: str | None


class Step(NamedTuple):
    """Append the last token of each answer to its row."""

    handles: list[int]
    tokens: list[int]
    drafted: list[list[int]]
    """Those to append after it, as they may come next; empty: none to any row."""


class Embed(NamedTuple):
    """Embed a prompt with images, before the first `Prefill` that has a part of one."""

    handle: int
    tokens: list[int]
    images: dict[str, list]
    """What the model's processor returned, by `packed`."""


class Prefill(NamedTuple):
    """Append a chunk of a prompt to a row, which will have row_length tokens with the rest of it."""

    handle: int
    tokens: list[int]
    row_length: int


class PrefillRows(NamedTuple):
    """Append several short prompts to their rows in one pass."""

    handles: list[int]
    prompts: list[list[int]]


class Score(NamedTuple):
    """As `Prefill`, with the logits of all tokens."""

    handle: int
    tokens: list[int]
    row_length: int


Operation = Add | Fork | Crop | Remove | End | Step | Embed | Prefill | PrefillRows | Score
METHODS: dict[type, str] = {
    Add: "add", Fork: "fork", Crop: "crop", Remove: "remove", End: "end",
    Step: "step", Embed: "embed", Prefill: "prefill", PrefillRows: "prefill_rows", Score: "score",
}  # fmt: skip
KINDS = {name: kind for kind, name in METHODS.items()}


def apply(operation: Operation, target) -> Any:
    """Call the method that carries it out, of an `Executor`, or of a `Forecast` of rows and memory."""
    return getattr(target, METHODS[type(operation)])(*operation)


class Plan(NamedTuple):
    """One turn."""

    operations: Sequence[Operation] = ()
    stop: bool = False
    """The loop ends with this turn."""
    idle: bool = False
    """No request is left."""
    failed: str | None = None
    """Why the leader gives up: there is nothing else in the plan."""

    def to_json(self) -> list[Any]:
        return [[(METHODS[type(operation)], *operation) for operation in self.operations], *self[1:]]

    @classmethod
    def from_json(cls, value: list[Any]) -> Plan:
        operations, *rest = value
        return cls([KINDS[name](*fields) for name, *fields in operations], *rest)
