"""What the ranks do in a turn of continuous batching: a short list of operations that the leader sends to all ranks.

Rows are named by handles that the leader chose; an operation is applied to an `Executor`, or to a `Forecast` of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Add(NamedTuple):
    """A new, empty row."""

    handle: int

    def apply(self, rows) -> None:
        rows.add(self.handle)


class Fork(NamedTuple):
    """A copy of a row."""

    handle: int
    copy: int

    def apply(self, rows) -> None:
        rows.fork(self.handle, self.copy)


class Crop(NamedTuple):
    """Forget a row's tokens from position `length` on."""

    handle: int
    length: int

    def apply(self, rows) -> None:
        rows.crop(self.handle, self.length)


class Remove(NamedTuple):
    """Forget a row."""

    handle: int

    def apply(self, rows) -> None:
        rows.remove(self.handle)


class End(NamedTuple):
    """The answer in a kept row has ended; for those who follow it on other ranks."""

    handle: int
    token: int | None
    """Its last token, if no `Step` had it."""
    reason: str
    error: str | None

    def apply(self, executor) -> None:
        executor.end(*self)


class Step(NamedTuple):
    """Append tokens to rows: the last one of each answer, and those that are drafted after it."""

    handles: list[int]
    tokens: list[list[int]]

    def apply(self, executor) -> list[Tensor]:
        return [executor.step(self.handles, self.tokens)]


class Prefill(NamedTuple):
    """Append a chunk of a prompt to a row, which will have row_length tokens with the rest of it."""

    handle: int
    tokens: list[int]
    row_length: int

    def apply(self, executor) -> list[Tensor]:
        return [executor.prefill(self.handle, self.tokens, self.row_length)]


class PrefillRows(NamedTuple):
    """Append several short prompts to their rows in one pass."""

    handles: list[int]
    prompts: list[list[int]]

    def apply(self, executor) -> list[Tensor]:
        return list(executor.prefill_rows(self.handles, self.prompts))


class Score(NamedTuple):
    """As `Prefill`, with the logits of all tokens."""

    handle: int
    tokens: list[int]
    row_length: int

    def apply(self, executor) -> list[Tensor]:
        return [executor.score(self.handle, self.tokens, self.row_length)]


RowOperation = Add | Fork | Crop | Remove
Operation = RowOperation | End | Step | Prefill | PrefillRows | Score
KINDS = {kind.__name__: kind for kind in (Add, Fork, Crop, Remove, End, Step, Prefill, PrefillRows, Score)}


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
        operations = [(type(operation).__name__, *operation) for operation in self.operations]
        return [operations, self.stop, self.idle, self.failed]

    @classmethod
    def from_json(cls, value: list[Any]) -> Plan:
        operations, *rest = value
        return cls([KINDS[name](*fields) for name, *fields in operations], *rest)
