"""The calls that this rank makes in a group: their numbers, what their messages carry, and which ones still run."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

REMEMBERED = 8  # latest calls that this rank can be asked about, and may wait in


@dataclass(eq=False)
class Call:
    """One call of a group."""

    name: str
    number: int
    after: int = 0
    """`CallRecord.made` when it began."""
    compare: Callable | None = None
    """compare(this call, store) is the request that compares it if another rank asks; None where it is or was."""
    runs: bool = False
    """Whether this rank runs the call, or did: it may wait in it, and can be asked about it. Not if it rejects it."""

    def __str__(self) -> str:
        return f"{self.name}, call {self.number} of its group"


class CallRecord:
    """The calls of one group on this rank. Its main thread makes them; other threads only read."""

    def __init__(self):
        self.stamp = 0
        """Carried by the messages of the current call, or else of the latest: its number, and 32 bits of what was
        agreed and of the step; 0 before the first call."""
        self.digest = 0
        """The stamp in 32 bits."""
        self.current: Call | None = None
        """The call that this rank is in."""
        self.latest = Call("", 0)
        """Number 0: there was none."""
        self.doubts = False
        """Whether the latest call ended in an error that left the group usable: the ranks compare the next one."""
        self.meets = True
        """Whether collectives that carry no stamp are preceded by a meeting (work.py)."""
        self.met = 0
        """Stamp of the latest call in which the ranks have met."""
        self.log: list[str] = []
        """The latest calls, where they are compared afterwards (agreement.py)."""
        self.step: tuple[dict, int] = {}, 0
        """What this rank's calls are part of: the values that identify it, and 32 bits of them. Calls of different
        steps don't belong together, however alike they are."""
        self.made = 0
        """Collectives since the latest call began: as many on every rank."""
        self._agreed = 0
        """Of the stamp, what was agreed."""
        self._latest: deque[Call] = deque(maxlen=REMEMBERED)

    def begin(self, name: str, digest: int = 0, *, meets: bool = True) -> Call:
        """The group's next call. digest: 32 bits of what its ranks agree on."""
        call = Call(name, self.latest.number + 1, self.made)
        self.meets, self.made = meets, 0
        self.current = self.latest = call
        self._latest.append(call)
        self._set_stamp(digest)
        return call

    def running(self) -> list[Call]:
        """The latest calls that run, or did, oldest first; from any thread."""
        return [call for call in list(self._latest) if call.runs]

    def begin_step(self, values: dict) -> None:
        """What comes now is part of a step that these values, equal on all ranks, and the number of the call before it
        identify."""
        values = {**values, "after_call": self.latest.number}
        self.set_step(values, zlib.crc32(repr(values).encode()))

    def set_step(self, values: dict, digest: int) -> None:
        self.step = values, digest
        self._set_stamp(self._agreed)

    def doubt(self) -> None:
        """The latest call ended in an error that left the group usable."""
        self.doubts = True
        self._set_stamp(0)

    def _set_stamp(self, agreed: int) -> None:
        self.stamp, self._agreed = self.latest.number << 32 | agreed ^ self.step[1], agreed
        self.digest = zlib.crc32(self.stamp.to_bytes(8, "little"))

    def place(self) -> str:
        """Where this rank is, for messages: " in tree_attn_func, call 3 of its group"."""
        return f" in {self.current}" if self.current else f" after {self.latest}" if self.latest.number else ""
