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
    compare: Callable | None = None
    """A request to the store that compares the call if another rank asks; None if it has been compared, or is being
    compared."""
    rejected: bool = False
    """Whether this rank has rejected the call itself."""

    def __str__(self) -> str:
        return f"{self.name}, call {self.number} of its group"


class CallRecord:
    """The calls of one group on this rank. Its main thread begins, joins and leaves them; other threads only read."""

    def __init__(self):
        self.stamp = 0
        """Carried by the messages of the current call, or else of the latest: its number, and 32 bits of what was
        agreed; 0 before the first call."""
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
        self._joined: deque[Call] = deque(maxlen=REMEMBERED)

    def begin(self, name: str, digest: int = 0, *, meets: bool = True) -> Call:
        """The group's next call. digest: 32 bits of what its ranks agree on."""
        number = self.latest.number + 1 if self.latest else 1
        self.meets = meets
        self._set_stamp(number << 32 | digest)
        self.current = self.latest = Call(name, number)
        return self.latest

    def _set_stamp(self, stamp: int) -> None:
        self.stamp, self.digest = stamp, zlib.crc32(stamp.to_bytes(8, "little"))

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

    def doubt(self, call: Call) -> None:
        """The call ended in an error that left the group usable."""
        self.doubts = True
        self._set_stamp(call.number << 32)

    def reject(self, call: Call) -> None:
        """This rank has rejected the call, and does not wait in it any more."""
        call.rejected = True
        self.doubt(call)
        if call in self._joined:
            self._joined.remove(call)

    def place(self) -> str:
        """Where this rank is, for messages: " in tree_attn_func, call 3 of its group"."""
        return f" in {self.current}" if self.current else f" after {self.latest}" if self.latest else ""
