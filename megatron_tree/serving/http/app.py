"""The HTTP routes of OpenAI's API, as a FastAPI application."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ...generation.sampling import first_fault
from ...log import logger
from . import responses_request
from .answers import ChatForm, CompletionForm, Form, respond
from .errors import TOO_MUCH, ApiError, failed
from .frontend import Frontend
from .guard import Guard
from .metrics import CONTENT_TYPE
from .prompts import Prompts
from .protocol import ChatRequest, CompletionRequest, GenerationRequest
from .responses_answer import ResponseForm
from .responses_request import ResponseRequest, renamed
from .tools import ToolText


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the routes use."""

    frontend: Frontend
    prompts: Prompts
    models: tuple[str, ...]
    """The names the model is served under; answers carry the one that the request used."""
    request_timeout: float
    """Seconds from a request's arrival to the end of its answer."""
    api_keys: tuple[str, ...] = ()
    """None: requests need no key."""
    loopback_names_only: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def model_entry(self, name: str) -> dict[str, Any]:
        """One model as /v1/models lists it; max_model_len is not OpenAI's: prompt and answer together, in tokens."""
        return {"id": name, "object": "model", "created": self.created, "owned_by": "megatron_tree",
                "max_model_len": self.prompts.max_model_len}  # fmt: skip


def create_app(service: Service) -> FastAPI:
    """The application; all errors have OpenAI's form."""
    app = FastAPI(
        title="megatron_tree",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    app.add_middleware(Guard, api_keys=service.api_keys, loopback_names_only=service.loopback_names_only)
    _add_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        health = service.frontend.health()
        return JSONResponse(health, 200 if health["status"] == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.frontend.metrics(), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_entry(name) for name in service.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return service.model_entry(name)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        _check_model(service, body.model)
        prompt, images = await service.prompts.of_chat(body)
        return await _answer(service, request, body, [prompt], ChatForm, images=images, tools=_tool_text(body))

    @app.post(responses_request.PATH)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        _check_model(service, body.model)
        prompt, images = await service.prompts.of_chat(body)
        options = {"images": images, "tools": _tool_text(body), "asked": body.asked}
        return await _answer(service, request, body, [prompt], ResponseForm, **options)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_model(service, body.model)
        prompts = await service.prompts.of_completion(body)
        echo = service.prompts.echo(body, prompts) if body.echo else None
        options = {"echo": echo, "n": body.n, "nothing_new": not body.max_tokens}
        return await _answer(service, request, body, prompts, CompletionForm, **options)

    return app


def _check_model(service: Service, name: str) -> None:
    service.frontend.check()
    if name not in service.models:
        raise ApiError(404, f"model: there is no model {name!r} here, only {', '.join(map(repr, service.models))}",
                       param="model", code="model_not_found")  # fmt: skip


async def _answer(
    service: Service,
    request: Request,
    body: GenerationRequest,
    prompts: list[list[int]],
    form: type[Form],
    images=None,
    **options,
) -> Response:
    limits = [service.prompts.max_tokens(prompt, body.limit) for prompt in prompts]
    ticket = await service.frontend.submit(prompts, [body.sampling(limit) for limit in limits], body.n, images)
    made = form(model=body.model, tokens=service.prompts.token_texts, logprobs=body.top_logprobs_wanted is not None,
                include_usage=body.include_usage, **options)  # fmt: skip
    return await respond(request, ticket, made, stream=body.stream, timeout=service.request_timeout)


def _tool_text(body: ChatRequest) -> Callable[[], ToolText] | None:
    """Makes what finds tool calls in one answer."""
    if not body.active_tools:
        return None
    names = [tool.function.name for tool in body.active_tools]
    options = {"most": None if body.parallel_tool_calls else 1, "forced": body.calls_are_forced}
    return functools.partial(ToolText, names, **options)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return (renamed(error) if request.url.path == responses_request.PATH else error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await api_error(request, invalid_request(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code in TOO_MUCH:
            return TOO_MUCH[error.status_code].response()
        if error.status_code == 400 and error.__cause__ is not None:  # by FastAPI, for what json.loads raises
            return ApiError(400, f"the body is not valid JSON: {error.__cause__}").response()
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}; docs/serving.md lists what is served"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return failed(f"the server failed on this request: {type(error).__name__}; see its log").response()


def invalid_request(error: RequestValidationError) -> ApiError:
    """400 that names the first bad field and what is wrong with it; alternatives of a union are reported together."""
    errors = [one | {"loc": one["loc"][1:]} for one in error.errors()]  # without "body"
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    where = first["loc"]
    if not where:
        return ApiError(400, "the body must be a JSON object, sent with the header 'Content-Type: application/json'")
    param = str(where[0])
    if first["type"] == "extra_forbidden":
        name = ".".join(str(part) for part in where)
        return ApiError(400, f"{name}: unknown field: leave it out", param=param, code="unknown_parameter")
    if first["type"] == "missing" and len(where) == 1:
        return ApiError(400, f"{param}: is missing", param=param, code="missing_required_parameter")
    param, fault = first_fault(errors)
    return ApiError(400, f"{param}: {fault}", param=param, code="invalid_value")
