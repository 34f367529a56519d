"""What clients may do: checks of every HTTP request before it is parsed (API key, Host header, size of the body, time
that it takes), and limits of their connections: how many are open, and how long the server waits for them."""

from __future__ import annotations

import asyncio
import hmac
import os
import resource
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ....core.log import is_due, logger
from . import errors
from .arguments import is_loopback
from .errors import ApiError, busy, stopping

OPEN_PATHS = ("/health",)  # load balancers and supervisors have no token
FREE_BYTES = 1 << 16  # of a body, which are taken whatever others take
MOST_CONNECTIONS = 4096
AT_ONCE = 16  # connections that are accepted before those that are open are counted
QUEUE = 1024  # connections that wait in the kernel to be accepted
SPARE = 128  # descriptors for those that were just accepted or closed, and for files
LINGER_S = 0.5  # for requests that are on their way when the server ends
TOLD_EVERY_S = 60.0


def _name_of(host_header: str) -> str:
    """The name or address in a Host header, without the port and without the brackets of IPv6."""
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header.partition(":")[0]


class _Body:
    """A request's body. `receive` limits its size, the time that it takes, and what all bodies take together.

    others: bytes of the large ones.
    """

    def __init__(self, receive: Receive, others: dict[_Body, int]):
        self._receive, self._others, self._size, self._whole = receive, others, 0, False
        self._end = asyncio.get_running_loop().time() + errors.RECEIVE_TIMEOUT_S

    async def receive(self) -> Message:
        """Raises: ApiError."""
        try:
            async with asyncio.timeout_at(None if self._whole else self._end):
                message = await self._receive()
                self._size += len(message.get("body", b""))
                if self._size > errors.MAX_BODY_BYTES:
                    raise errors.too_large()
                if self._size > FREE_BYTES:
                    self._others[self] = self._size
                    if sum(self._others.values()) > errors.MAX_BODIES_BYTES:
                        del self._others[self]
                        while message.get("more_body"):  # a client that still writes may never read
                            message = await self._receive()
                        raise busy("the bodies of other requests take all memory that there is for them")
        except TimeoutError:
            raise errors.too_slow() from None
        self._whole = not message.get("more_body", False)
        return message


def token_of(headers: Headers) -> str:
    """The API key that came with a request."""
    return headers.get("authorization", "").partition(" ")[2].strip()


class Guard:
    """ASGI middleware: 401 without a right token, 413 or 408 for a body too large or slow, 403 for other names, 503
    while other bodies take too much memory, and for requests that have no answer yet when the server ends.

    api_keys: the right tokens, or none. loopback_names_only: refuse Host headers of other names: a web page can give
    its own name the address 127.0.0.1 and so make a browser talk to a server that asks for no token.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], loopback_names_only: bool):
        self.app, self.loopback_names_only = app, loopback_names_only
        self.api_keys = [key.encode() for key in api_keys]
        self._bodies: dict[_Body, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        error = self._name_error(headers) or (None if scope["path"] in OPEN_PATHS else self._token_error(headers))
        error = error or self._length_error(headers)
        if error is None:
            await self._answered(scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Limits the body; a request that is cancelled when the server ends still has an answer."""
        body, begun = _Body(receive, self._bodies), False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, body.receive, noted)
        except asyncio.CancelledError:
            if not begun:
                await stopping().response()(scope, receive, send)
        finally:
            self._bodies.pop(body, None)

    def _length_error(self, headers: Headers) -> ApiError | None:
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers and "content-length" in headers:  # which of them counts, others may see apart
            text = "the headers Content-Length and Transfer-Encoding exclude each other: send one of them"
            return ApiError(400, text, headers={"Connection": "close"})
        if not length.isascii() or not length.isdecimal():
            return ApiError(400, f"the header Content-Length: {length[:40]!r} must be a number of bytes")
        return errors.too_large() if int(length[:20]) > errors.MAX_BODY_BYTES else None

    def _name_error(self, headers: Headers) -> ApiError | None:
        name = _name_of(headers.get("host", ""))
        if not self.loopback_names_only or is_loopback(name):
            return None
        return ApiError(
            403,
            f"the Host header names {name!r}: without an API key only localhost and loopback addresses are served; "
            "start the server with --api-key-file to use it under other names",
            code="host_not_allowed",
        )

    def _has_key(self, headers: Headers) -> bool:
        scheme, given = headers.get("authorization", "").partition(" ")[0], token_of(headers).encode()
        right = [hmac.compare_digest(given, key) for key in self.api_keys]
        return any(right) and scheme.lower() == "bearer"

    def _token_error(self, headers: Headers) -> ApiError | None:
        if not self.api_keys or self._has_key(headers):
            return None
        what = "is wrong" if token_of(headers) else "is missing"
        return ApiError(
            401,
            f"the API key {what}: send the header 'Authorization: Bearer KEY' with a key the server was started with",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


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
