"""Connections of the HTTP server: those that do not send their request in time are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol(receive_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which waits this many seconds at most for the headers of a request that is under way.

    Between requests its own time limit applies; `Guard` has that of the body.
    """

    class Protocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait()
            else:
                self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._timer is None and not self.transport.is_closing():
                self._timer = self.loop.call_later(receive_timeout, self.transport.close)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Protocol
