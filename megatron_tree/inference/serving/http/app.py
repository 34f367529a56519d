"""The HTTP routes of OpenAI's API, as a FastAPI application."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from ....core.arguments import suggestion
from ....core.log import logger
from ...generation.sampling import first_fault
from .answers import ChatForm, CompletionForm, Form, respond
from .errors import ApiError, failed
from .frontend import Frontend
from .guard import Guard, token_of
from .metrics import CONTENT_TYPE
from .prompts import Prompts
from .protocol import ChatRequest, CompletionRequest, GenerationRequest
from .responses import PATH, ResponseForm, ResponseRequest, renamed
from .tools import ToolText

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
        raise _invalid(error.errors(include_url=False, include_input=False), model) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _no_object() -> ApiError:
    return ApiError(400, "the body must be a JSON object, sent with the header 'Content-Type: application/json'")


def _invalid(errors: list[dict[str, Any]], model: type[Body]) -> ApiError:
    """400 that names the first bad field and what is wrong with it; alternatives of a union are reported together."""
    first = errors[0]
    if not first["loc"]:
        too_many = first["type"] == "value_error"  # fields
        return ApiError(400, f"the body {first['msg'].removeprefix('Value error, ')}") if too_many else _no_object()
    where = list(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        meant = suggestion(where, model.model_fields, 0.8) if len(where) == 1 else ""  # others may be vLLM's
        return ApiError(400, f"{'.'.join(where)}: unknown field: leave it out{meant}", param=where[0],
                        code="unknown_parameter")  # fmt: skip
    if first["type"] == "missing" and len(where) == 1:
        return ApiError(400, f"{where[0]}: is missing", param=where[0], code="missing_required_parameter")
    param, fault = first_fault(errors)
    return ApiError(400, f"{param}: {fault}", param=param, code="invalid_value")


ChatBody = Annotated[ChatRequest, Depends(body_of(ChatRequest))]
ResponseBody = Annotated[ResponseRequest, Depends(body_of(ResponseRequest))]
CompletionBody = Annotated[CompletionRequest, Depends(body_of(CompletionRequest))]


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
        openapi_url=None,  # bodies are read by `body_of`
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
    async def chat(body: ChatBody, request: Request) -> Response:
        _check_model(service, body.model)
        prompt, images = await service.prompts.chat_prompt(body)
        options = {"images": images, "tools": _tool_text(body), "continues": body.continue_final_message}
        return await _answer(service, request, body, [prompt], ChatForm, **options)

    @app.post(PATH)
    async def responses(body: ResponseBody, request: Request) -> Response:
        _check_model(service, body.model)
        prompt, images = await service.prompts.chat_prompt(body)
        options = {"images": images, "tools": _tool_text(body), "asked": body.asked}
        return await _answer(service, request, body, [prompt], ResponseForm, **options)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        _check_model(service, body.model)
        prompts = await service.prompts.completion_prompts(body)
        echo = await service.prompts.echo(body, prompts) if body.echo else None
        options = {"continued": prompts, "echo": echo, "n": body.n, "nothing_new": not body.max_tokens}
        return await _answer(service, request, body, prompts, CompletionForm, continues=True, **options)

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
    continues=False,
    **options,
) -> Response:
    limits = [service.prompts.max_tokens(prompt, body.limit) for prompt in prompts]
    sampling = {limit: body.sampling(limit) for limit in set(limits)}  # one for all prompts of a completion
    salt = _salt(token_of(request.headers) if service.api_keys else "", body.cache_salt or "")
    each = [sampling[limit] for limit in limits]
    ticket = await service.frontend.submit(prompts, each, n=body.n, salt=salt, images=images, continues=continues)
    answer = form(model=body.model, tokens=service.prompts.token_texts, logprobs=body.top_logprobs_wanted is not None,
                include_usage=body.include_usage, **options)  # fmt: skip
    return await respond(request, ticket, answer, stream=body.stream, timeout=service.request_timeout)


def _salt(key: str, salt: str) -> str:
    """Of a client's prompts: its key and its own salt, but not to be read from it."""
    return hashlib.sha256(json.dumps([key, salt]).encode()).hexdigest() if key or salt else ""


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
        return (renamed(error) if request.url.path == PATH else error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}; docs/serving.md lists what is served"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return failed(f"the server failed on this request: {type(error).__name__}; see its log").response()
