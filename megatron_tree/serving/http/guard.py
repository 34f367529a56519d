"""Checks of every HTTP request before it is parsed: API key, Host header, size of the body, time that it takes."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import errors
from .errors import TOO_MUCH, ApiError

OPEN_PATHS = ("/health",)  # load balancers and supervisors have no token


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach a server on this address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]").split("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _name_of(host_header: str) -> str:
    """The name or address in a Host header, without the port and without the brackets of IPv6."""
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header.partition(":")[0]


class Guard:
    """ASGI middleware: 401 without a right token, 413 or 408 for a body too large or slow, 403 for other names.

    api_keys: the right tokens, or none. loopback_names_only: refuse Host headers of other names: a web page can give
    its own name the address 127.0.0.1 and so make a browser talk to a server that asks for no token.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], loopback_names_only: bool):
        self.app, self.loopback_names_only = app, loopback_names_only
        self.api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        error = self._name_error(headers) or (None if scope["path"] in OPEN_PATHS else self._token_error(headers))
        error = error or self._length_error(headers.get("content-length", "0"))
        if error is None:
            await self.app(scope, self._limited(receive), send)
        else:
            await error.response()(scope, receive, send)

    def _limited(self, receive: Receive) -> Receive:
        """Limits size, for chunked bodies without a Content-Length, and time."""
        size, whole, end = 0, False, asyncio.get_running_loop().time() + errors.RECEIVE_TIMEOUT_S

        async def limited() -> Message:
            nonlocal size, whole
            try:
                async with asyncio.timeout_at(None if whole else end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408) from None  # the one kind of error that FastAPI lets through while it reads
            whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > errors.MAX_BODY_BYTES:
                raise HTTPException(413)
            return message

        return limited

    def _length_error(self, length: str) -> ApiError | None:
        if not length.isascii() or not length.isdecimal():
            return ApiError(400, f"the header Content-Length: {length[:40]!r} must be a number of bytes")
        return TOO_MUCH[413] if int(length[:20]) > errors.MAX_BODY_BYTES else None

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
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        right = [hmac.compare_digest(given, key) for key in self.api_keys]
        return any(right) and scheme.lower() == "bearer"

    def _token_error(self, headers: Headers) -> ApiError | None:
        if not self.api_keys or self._has_key(headers):
            return None
        what = "is wrong" if headers.get("authorization", "").partition(" ")[2] else "is missing"
        return ApiError(
            401,
            f"the API key {what}: send the header 'Authorization: Bearer KEY' with a key the server was started with",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, with a time limit for the headers of a request that is under way.

    Between requests its own time limit applies; `Guard` has that of the body.
    """

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
            self._timer = self.loop.call_later(errors.RECEIVE_TIMEOUT_S, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
