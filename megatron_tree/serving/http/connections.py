"""Connections of clients: how many are open, and how long the server waits for them."""

from __future__ import annotations

import asyncio
import os
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ...log import is_due, logger
from . import errors
from .errors import busy

MOST_CONNECTIONS = 4096
AT_ONCE = 16  # connections that are accepted before those that are open are counted
QUEUE = 1024  # connections that wait in the kernel to be accepted
SPARE = 128  # descriptors for those that were just accepted or closed, and for files
LINGER_S = 0.5  # for requests that are on their way when the server ends
TOLD_EVERY_S = 60.0


def most_connections() -> int:
    """So many that no descriptor is missed."""
    free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) - SPARE
    return max(1, min(MOST_CONNECTIONS, free))


class Connections:
    """Those that are open, at most so many. One more takes the place of the one that has not sent a whole request for
    the longest time; while all are being answered it gets a 503."""

    def __init__(self, most: int):
        self._most = most
        self._open: dict[TimedProtocol, None] = {}  # in the order in which their clients' turn began

    def add(self, new: TimedProtocol) -> None:
        """Also for one whose client's turn begins again."""
        self._open.pop(new, None)
        if len(self._open) >= self._most:
            self._make_room(new)
        self._open[new] = None

    def remove(self, one: TimedProtocol) -> None:
        self._open.pop(one, None)

    def _make_room(self, new: TimedProtocol) -> None:
        idle = next((one for one in self._open if one.is_incomplete), new)
        if is_due("connections", TOLD_EVERY_S):
            logger.warning("%d connections are open, as many as descriptors allow: %s", self._most,
                           "a new one gets a 503" if idle is new else "one without a request is closed")  # fmt: skip
        if idle is new:
            new.refuse()
        else:
            self.remove(idle)
            idle.transport.abort()


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, with a time limit for what a client has to do: send the headers of a request, and read what
    it is sent. `Guard` has that of the body."""

    def __init__(self, *args: Any, others: Connections, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._others, self._timer, self._unread = others, None, 0

    @property
    def is_incomplete(self) -> bool:
        """Whether there is no whole request to be answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def refuse(self) -> None:
        """Say that there are too many connections."""
        self.transport.write(busy("there are too many connections").raw())
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._others.add(self)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._others.add(self)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def shutdown(self) -> None:
        """The server ends; a request that comes at the last moment still gets its 503."""
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LINGER_S, self._end)
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.remove(self)
        self._stop()
        super().connection_lost(exc)

    def _end(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            self._stop()
        elif self._timer is None:
            self._wait()

    def _wait(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(errors.RECEIVE_TIMEOUT_S, self._expire)

    def _expire(self) -> None:
        if 0 < self.transport.get_write_buffer_size() < self._unread:  # it reads, slowly
            self._wait()
        else:
            self.transport.abort()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
