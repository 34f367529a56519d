"""The calls that this rank makes in a group: their numbers, what their messages carry, and which ones still run."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

REMEMBERED = 8  # latest calls that this rank can be asked about, and may wait in


@dataclass(eq=False)
class Call:
    """One call of a group."""

    name: str
    number: int
    after: int = 0
    """`CallRecord.made` when it began."""
    compare: Callable | None = None
    """A request to the store that compares the call if another rank asks; None if it has been compared, or is being
    compared."""
    rejected: bool = False
    """Whether this rank has rejected the call itself."""

    def __str__(self) -> str:
        return f"{self.name}, call {self.number} of its group"


class Step(NamedTuple):
    """What ranks run in step: calls that are part of different ones don't belong together, however alike they are."""

    digest: int
    """32 bits of the values."""
    values: dict

    @classmethod
    def after(cls, number: int, values: dict) -> Step:
        """The step that begins after the call of this number."""
        values = {**values, "after_call": number}
        return cls(zlib.crc32(repr(values).encode()), values)


class CallRecord:
    """The calls of one group on this rank. Its main thread begins, joins and leaves them; other threads only read."""

    def __init__(self):
        self.stamp = 0
        """Carried by the messages of the current call, or else of the latest: its number, and 32 bits of what was
        agreed and of the step; 0 before the first call."""
        self.digest = 0
        """The stamp in 32 bits."""
        self.current: Call | None = None
        """The call that this rank is in."""
        self.latest: Call | None = None
        self.doubts = False
        """Whether the latest call ended in an error that left the group usable: the ranks compare the next one."""
        self.meets = True
        """Whether collectives that carry no stamp are preceded by a meeting (work.py)."""
        self.met = 0
        """Stamp of the latest call in which the ranks have met."""
        self.log: list[str] = []
        """agreement.py: the latest calls, where they are compared afterwards."""
        self.step: Step | None = None
        """What this rank's calls are part of."""
        self.made = 0
        """Collectives since the latest call began: as many on every rank."""
        self._agreed = 0
        """Of the stamp, what was agreed."""
        self._joined: deque[Call] = deque(maxlen=REMEMBERED)

    def begin(self, name: str, digest: int = 0, *, meets: bool = True) -> Call:
        """The group's next call. digest: 32 bits of what its ranks agree on."""
        number, after = self.latest.number + 1 if self.latest else 1, self.made
        self.meets, self.made = meets, 0
        self.current = self.latest = Call(name, number, after)
        self._set_stamp(digest)
        return self.latest

    def begin_step(self, step: Step | None) -> None:
        """What comes now is part of this step."""
        self.step = step
        self._set_stamp(self._agreed)

    def _set_stamp(self, agreed: int) -> None:
        number, within = self.latest.number if self.latest else 0, self.step.digest if self.step else 0
        self.stamp, self._agreed = number << 32 | agreed ^ within, agreed
        self.digest = zlib.crc32(self.stamp.to_bytes(8, "little"))

    def outside(self) -> tuple[int, int] | None:
        """(number of the latest call, collectives since it began) of a rank that is in no call; from any thread."""
        latest, made = self.latest, self.made
        if self.current is not None or self.latest is not latest:
            return None
        return latest.number if latest else 0, made

    def join(self, call: Call) -> None:
        """This rank runs the call: from now on it may wait in it, and can be asked about it."""
        self._joined.append(call)

    def joined(self) -> list[Call]:
        """The latest calls that this rank has joined, oldest first; from any thread."""
        return list(self._joined)

    def leave(self, call: Call) -> None:
        """This rank is done with the call, one way or another."""
        if self.current is call:
            self.current = None

    def doubt(self) -> None:
        """The latest call ended in an error that left the group usable."""
        self.doubts = True
        self._set_stamp(0)

    def reject(self, call: Call) -> None:
        """This rank has rejected the call, and does not wait in it any more."""
        call.rejected = True
        self.doubt()
        if call in self._joined:
            self._joined.remove(call)

    def place(self) -> str:
        """Where this rank is, for messages: " in tree_attn_func, call 3 of its group"."""
        return f" in {self.current}" if self.current else f" after {self.latest}" if self.latest else ""
