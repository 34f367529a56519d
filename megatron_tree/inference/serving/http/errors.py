"""Errors as OpenAI's clients expect them: a status code and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math

from starlette.responses import JSONResponse

MAX_BODY_BYTES = 32 << 20
MAX_BODIES_BYTES = 256 << 20  # of all requests under way
RETRY_AFTER_S = 2
RECEIVE_TIMEOUT_S = 30.0  # for the headers of a request, and for its body
MOST_TEXT = 2000  # characters of a message
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error.

    status: HTTP status code. param: the request's field at fault, or None. code: a short name that programs can
    compare, or None. headers: of the response.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers
        self.kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")

    def body(self) -> dict:
        """The error object, ready for JSON."""
        texts = {"message": _brief(self.message), "param": self.param and _brief(self.param)}
        return {"error": {"type": self.kind, "code": self.code, **texts}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)

    def raw(self) -> bytes:
        """The response on a connection that ends with it."""
        response = self.response()
        fields = [*response.raw_headers, (b"connection", b"close")]
        head = [b"HTTP/1.1 %d Error" % self.status, *(b"%s: %s" % field for field in fields)]
        return b"\r\n".join([*head, b"", response.body])


def refused(param: str, message: str) -> ApiError:
    """400 for an unsupported field; `message` says why, and what to do instead."""
    return ApiError(400, f"{param}: {message}", param=param, code="unsupported_parameter")


def bad_value(param: str, message: str) -> ApiError:
    """400 for a bad value; `message` says why, and what is valid."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def stopping() -> ApiError:
    """503 while the server shuts down."""
    text = "the server is shutting down: send the request again later or elsewhere"
    return ApiError(503, text, code="shutting_down", headers={"Retry-After": "30"})


def busy(why: str) -> ApiError:
    """503 for a request that other requests leave no room for."""
    text = f"{why}: send the request again after the time in Retry-After"
    return ApiError(503, text, code="busy", headers={"Retry-After": str(RETRY_AFTER_S)})


def restarting(seconds: float) -> ApiError:
    """503 while the ranks are started again, which may take this long."""
    text = "a rank was lost and the ranks are being started again: send the request again after the time in Retry-After"
    return ApiError(503, text, code="restarting", headers={"Retry-After": str(math.ceil(seconds))})


def timed_out(seconds: float) -> ApiError:
    """504 for a request that took longer than the server allows, with the time it had."""
    return ApiError(
        504,
        f"the answer was not complete after the server's limit of {seconds:g} s, so it was cancelled: ask for fewer "
        "tokens, or start the server with a larger --request-timeout",
        code="timeout",
    )


def failed(message: str) -> ApiError:
    """500 for a failure of the server."""
    return ApiError(500, message, code="internal_error")


def too_large() -> ApiError:
    """413."""
    return ApiError(
        413,
        f"the body is larger than this server's limit of {MAX_BODY_BYTES:,} bytes: send less at once",
        code="body_too_large",
    )


def too_slow() -> ApiError:
    """408."""
    return ApiError(
        408,
        f"the body was not complete after this server's limit of {RECEIVE_TIMEOUT_S:g} s: send it faster",
        code="body_too_slow",
        headers={"Connection": "close"},
    )


def _brief(text: str) -> str:
    """A message may quote what a client sent; what is no UTF-8 is escaped."""
    text = text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT // 2]} ... {text[-MOST_TEXT // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()
