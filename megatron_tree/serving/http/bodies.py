"""Bodies of requests: read, and checked where a large one keeps nobody else waiting."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from ...generation.sampling import first_fault
from .errors import ApiError

Body = TypeVar("Body", bound=BaseModel)

SMALL_BYTES = 1 << 16  # read in the event loop
MOST_VALUES = 1 << 21  # about 0.1 s in which a JSON parser lets no other thread run


def body_of(model: type[Body]) -> Callable[[Request], Awaitable[Body]]:
    """A dependency of a route: the request's body, which is JSON. Raises: ApiError (400)."""

    async def read(request: Request) -> Body:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not kind.startswith("application/") or not kind.endswith(("/json", "+json")):
            raise _no_object()
        try:
            data = b"".join([piece async for piece in request.stream()])
        except ClientDisconnect:
            raise ApiError(400, "the body is not complete") from None  # nobody reads this
        checked = functools.partial(_checked, model, data)
        return checked() if len(data) <= SMALL_BYTES else await run_in_threadpool(checked)

    return read


def _checked(model: type[Body], data: bytes) -> Body:
    if (values := data.count(b",")) > MOST_VALUES:
        raise ApiError(400, f"the body has {values:,} commas, more than {MOST_VALUES:,}: send it in several requests")
    try:
        return model.model_validate(json.loads(data))
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False)) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _no_object() -> ApiError:
    return ApiError(400, "the body must be a JSON object, sent with the header 'Content-Type: application/json'")


def _invalid(errors: list[dict[str, Any]]) -> ApiError:
    """400 that names the first bad field and what is wrong with it; alternatives of a union are reported together."""
    first = errors[0]
    if not first["loc"]:
        too_many = first["type"] == "value_error"  # fields
        return ApiError(400, f"the body {first['msg'].removeprefix('Value error, ')}") if too_many else _no_object()
    where = list(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{'.'.join(where)}: unknown field: leave it out", param=where[0],
                        code="unknown_parameter")  # fmt: skip
    if first["type"] == "missing" and len(where) == 1:
        return ApiError(400, f"{where[0]}: is missing", param=where[0], code="missing_required_parameter")
    param, fault = first_fault(errors)
    return ApiError(400, f"{param}: {fault}", param=param, code="invalid_value")
