"""FastAPI application of the server: the HTTP routes, and their responses as JSON or events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from importlib.resources import files
from traceback import format_tb
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pronk import ClosedError, PronkError, __version__
from pronk.base import SMALL_JOB
from pronk.server.bodies import BodyReader, BodyRoute, validate
from pronk.server.errors import (
    ANTHROPIC_PATHS,
    ApiError,
    shutting_down,
    to_api_error,
    validation_to_api_error,
)
from pronk.server.guard import LICENSE_PATH, SCRIPT_PATHS, STYLE_PATH, tenant_of
from pronk.server.llama_server import server_props, server_slots
from pronk.server.model_pool import ModelPool
from pronk.server.ollama_models import describe, list_loaded, list_tags, loaded_reply
from pronk.server.paths import unknown_path_message
from pronk.server.protocol.chat import ChatRequest
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.field_report import IGNORED_HEADER, report_header
from pronk.server.protocol.infill import InfillRequest
from pronk.server.protocol.messages import CountTokensRequest, MessagesRequest
from pronk.server.protocol.ollama import (
    API_VERSION,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaInfillRequest,
    PullRequest,
    ShowRequest,
)
from pronk.server.protocol.request import RequestBody, TextRequest
from pronk.server.protocol.responses import ResponsesRequest
from pronk.server.protocol.small_routes import (
    DetokenizeRequest,
    EmbeddingRequest,
    ModerationRequest,
    RerankRequest,
    TokenizeRequest,
)
from pronk.server.pulls import Pulls

_log = logging.getLogger(__name__)

# Form of a stream: server-sent events, such events with a line ``event: TYPE`` each, or a JSON
# object per line.
StreamForm = Literal["events", "named events", "lines"]

# Maximum number of JSON values per call of the encoder. No other thread runs during a call, and a
# reply may have millions of values.
_PART = 1024
# Work of encoding one JSON value of a reply, in the unit of FairExecutor: the work of parsing one
# byte of a request's body.
_VALUE_SIZE = 4
# Number of characters of server-sent events that are encoded before the event loop runs other
# requests.
_WRITTEN_AT_ONCE = 2**14

# The chat page loads nothing from other origins, runs no inline code, cannot be put in a frame and
# sends no Referer.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}
_PAGE = {
    "/": ("index.html", "text/html"),
    STYLE_PATH: (STYLE_PATH[1:], "text/css"),
    LICENSE_PATH: (LICENSE_PATH[1:], "text/plain"),
    **{path: (path[1:], "text/javascript") for path in SCRIPT_PATHS},
}


class ErrorDetail(BaseModel):
    """Object ``error`` of an error response; ``param`` names the invalid field of the request."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorDetail


# FastAPI makes a validator of each model of each route, most of the time in which a server starts:
# only one of the responses has the model, by which the schema of the others is known.
_ERROR_SCHEMA = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody},
    **{
        status: {"content": _ERROR_SCHEMA}
        for status in (401, 404, 408, 413, 415, 421, 429, 431, 500, 503)
    },
}


def make_app(models: ModelPool) -> FastAPI:
    """Return the application that serves the models of a pool."""
    app = FastAPI(
        title="pronk",
        version=__version__,
        docs_url=None,  # FastAPI's documentation pages load scripts from other sites
        redoc_url=None,
        responses=_ERRORS,
        redirect_slashes=False,
    )
    app.router.route_class = BodyRoute
    app.state.bodies = BodyReader(models.settings, models.executor)
    for error_class in (RequestValidationError, HTTPException, ApiError, PronkError, Exception):
        app.add_exception_handler(error_class, _error_response)
    _add_status_routes(app, models)
    _add_generation_routes(app, models)
    _add_other_routes(app, models)
    _add_ollama_models(app, models)
    _add_ollama_answers(app, models)
    _add_llama_server_routes(app, models)
    if models.pulls is not None:
        _add_pull(app, models, models.pulls)
    if models.settings.serve_chat_page:
        _add_page(app)
    return app


def _add_status_routes(app: FastAPI, models: ModelPool) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Report that the server is running."""
        return {"status": "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """Report whether the server accepts requests; the status is 503 if it does not."""
        if await models.is_ready():
            return JSONResponse({"status": "ready"})
        state = "ending" if models.draining else "not ready"
        return JSONResponse({"status": state}, HTTPStatus.SERVICE_UNAVAILABLE)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(models.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the models of this server and their adapters, with the states of the models."""
        entries = [entry for model in models.models for entry in model.describe()]
        return {"object": "list", "data": entries}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe a model or an adapter."""
        found = models.find(name)
        shown = found.names.shown_as(name)
        return next(entry for entry in found.describe() if entry["id"] == shown)


def _add_generation_routes(app: FastAPI, models: ModelPool) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue one or more prompts."""
        return await _reply(models, request, body)

    @app.post("/infill", response_model=None)
    async def infill(request: Request, body: InfillRequest) -> Response:
        """Write the text between a prefix and a suffix, in the format of llama.cpp's server."""
        return await _reply(models, request, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await _reply(models, request, body)

    @app.post("/v1/responses", response_model=None)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation in the format of OpenAI's Responses API."""
        return await _reply(models, request, body, "named events")

    @app.post("/v1/messages", response_model=None)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Answer a conversation in the format of Anthropic's Messages API."""
        return await _reply(models, request, body, "named events")

    @app.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
        """Count the tokens of a conversation in the format of Anthropic's Messages API."""
        tenant = tenant_of(request.scope)
        async with models.use(body.model, tenant) as (service, _):
            reply = {"input_tokens": await service.count_tokens(body, tenant)}
            return await _respond(models, tenant, reply, body)


def _add_other_routes(app: FastAPI, models: ModelPool) -> None:
    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        """Return the embeddings of one or more texts."""
        return await _embed(models, request, body)

    @app.post("/v1/rerank", response_model=None)
    async def rerank(request: Request, body: RerankRequest) -> Response:
        """Order documents by their relevance to a query, as the model judges it."""
        tenant = tenant_of(request.scope)
        async with models.use(body.model, tenant) as (service, arrived):
            reply = await service.rerank(body, tenant, arrived=arrived)
            return await _respond(models, tenant, reply, body)

    @app.post("/v1/moderations", response_model=None)
    async def moderations(request: Request, body: ModerationRequest) -> Response:
        """Classify texts by the model's own probabilities."""
        tenant = tenant_of(request.scope)
        async with models.use(body.model, tenant) as (service, arrived):
            reply = await service.moderate(body, tenant, arrived=arrived)
            return await _respond(models, tenant, reply, body)

    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """Return the token ids of a text or a conversation."""
        tenant = tenant_of(request.scope)
        async with models.use(body.model, tenant) as (service, _):
            reply = await service.tokenize(body, tenant)
            return await _respond(models, tenant, reply, body)

    @app.post("/detokenize", response_model=None)
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        tenant = tenant_of(request.scope)
        async with models.use(body.model, tenant) as (service, _):
            reply = await service.detokenize(body, tenant)
            return await _respond(models, tenant, reply, body)

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
        """Describe the tokenizer of a model: special tokens, chat template, maximum length."""
        async with models.use(model, tenant_of(request.scope)) as (service, _):
            return service.tokenizer_info()


def _add_ollama_models(app: FastAPI, models: ModelPool) -> None:
    """Add the routes of Ollama's API that describe models."""

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        """Return the version of Ollama whose API this is, and that of pronk."""
        return {"version": API_VERSION, "pronk": __version__}

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """List the models of this server and their adapters."""
        return {"models": list_tags(models)}

    @app.get("/api/ps")
    async def ps() -> dict[str, Any]:
        """List the loaded models."""
        return {"models": list_loaded(models)}

    @app.post("/api/show", response_model=None)
    async def show(request: Request, body: ShowRequest) -> Response:
        """Describe a model; one that is not loaded has no description of its layers."""
        reply = describe(models.find(body.model))
        return await _respond(models, tenant_of(request.scope), reply, body)


def _add_ollama_answers(app: FastAPI, models: ModelPool) -> None:
    """Add the routes of Ollama's API that run a model."""

    @app.post("/api/chat", response_model=None)
    async def chat(request: Request, body: OllamaChatRequest) -> Response:
        """Answer a conversation; without messages, load the model."""
        if body.messages:
            return await _reply(models, request, body, "lines")
        return await _load(models, request, body, {"message": {"role": "assistant", "content": ""}})

    @app.post("/api/generate", response_model=None)
    async def generate(request: Request, body: OllamaGenerateRequest) -> Response:
        """Answer one prompt, or fill the text before a suffix; without a prompt, load the model."""
        if body.suffix:
            tenant = tenant_of(request.scope)
            size = body.num_bytes
            infill = await models.executor.run(
                tenant, validate, OllamaInfillRequest, body.given, size=size
            )
            infill.num_bytes = size
            return await _reply(models, request, infill, "lines")
        if body.prompt:
            return await _reply(models, request, body, "lines")
        return await _load(models, request, body, {"response": ""})

    @app.post("/api/embed", response_model=None)
    async def embed(request: Request, body: OllamaEmbedRequest) -> Response:
        """Return the embeddings of one or more texts."""
        return await _embed(models, request, body)

    @app.post("/api/embeddings", response_model=None)
    async def embeddings(request: Request, body: OllamaEmbeddingsRequest) -> Response:
        """Return the embedding of one text."""
        return await _embed(models, request, body)


def _add_pull(app: FastAPI, models: ModelPool, pulls: Pulls) -> None:
    """Add the route of Ollama's API that downloads a model."""

    @app.post("/api/pull", response_model=None)
    async def pull(request: Request, body: PullRequest) -> Response:
        """Download a model of the Hub, and serve it; only by keys that may."""
        tenant = tenant_of(request.scope)
        chunks = pulls.pull(body.model, tenant)
        if body.stream:
            return await _stream(models, request, body, chunks, "lines")
        lines = [line async for chunk in chunks for line in chunk]
        return await _respond(models, tenant, lines[-1], body)


def _add_llama_server_routes(app: FastAPI, models: ModelPool) -> None:
    """Add the routes of llama-server that show the state of a server and change nothing."""

    @app.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        """Describe a model and the defaults of its requests."""
        return server_props(models.find(model))

    @app.get("/slots")
    async def slots(model: str | None = None) -> list[dict[str, Any]]:
        """List the requests that can run at the same time; no prompt is shown."""
        return server_slots(models.find(model))


def _add_page(app: FastAPI) -> None:
    folder = files("pronk.server") / "page"
    for path, (name, media_type) in _PAGE.items():
        page = Response((folder / name).read_bytes(), media_type=media_type, headers=PAGE_HEADERS)
        # Some clients send HEAD / to find out whether the server is running.
        app.add_route(path, _always(page), methods=["GET", "HEAD"], include_in_schema=False)


def _always(response: Response) -> Callable[[Request], Awaitable[Response]]:
    """Return the function of a route that always returns the same response."""

    async def respond(_: Request) -> Response:
        return response

    return respond


async def _reply(
    models: ModelPool, request: Request, body: TextRequest, form: StreamForm = "events"
) -> Response:
    """Return the response to a request for text: one JSON body, or a stream of a form."""
    tenant = tenant_of(request.scope)
    if not body.stream:
        async with models.use(body.model, tenant) as (service, arrived):
            reply = await service.complete(body, tenant, arrived=arrived)
            return await _respond(models, tenant, reply, body)
    return await _stream(models, request, body, models.stream(body, tenant), form)


async def _stream(
    models: ModelPool,
    request: Request,
    body: RequestBody,
    chunks: AsyncGenerator[list[dict[str, Any]]],
    form: StreamForm,
) -> Response:
    """Return a response that streams the chunks of a reply, in a form."""
    tenant = tenant_of(request.scope)
    try:
        first = await anext(chunks)  # raises an error of the request before the HTTP status is sent
        report = await models.executor.run(tenant, _report_header, body, size=body.num_bytes)
    except BaseException:  # raised also if the request is cancelled
        await chunks.aclose()  # no StreamingResponse was made, which would close the generator
        raise
    events = _events(chunks, first, request.url.path, form)
    headers = {"Cache-Control": "no-store", **report}
    media_type = "application/x-ndjson" if form == "lines" else "text/event-stream"
    return StreamingResponse(events, media_type=media_type, headers=headers)


async def _load(
    models: ModelPool, request: Request, body: TextRequest, empty: Mapping[str, Any]
) -> Response:
    """Load a model; return Ollama's response to a request without a prompt."""
    tenant = tenant_of(request.scope)
    async with models.use(body.model, tenant) as (service, _):
        reply = loaded_reply(service.names.shown_as(body.model), empty)
        return await _respond(models, tenant, reply, body)


async def _embed(models: ModelPool, request: Request, body: EmbeddingRequest) -> Response:
    """Return the response to a request for embeddings."""
    tenant = tenant_of(request.scope)
    async with models.use(body.model, tenant) as (service, arrived):
        reply = await service.embed(body, tenant, arrived=arrived)
        return await _respond(models, tenant, reply, body)


async def _respond(
    models: ModelPool, tenant: str, reply: Mapping[str, Any], body: RequestBody
) -> Response:
    """Return a reply as an HTTP response; encode large replies in a thread."""
    num_values = _num_values(reply, SMALL_JOB // _VALUE_SIZE)
    size = max(body.num_bytes, _VALUE_SIZE * num_values)
    return await models.executor.run(tenant, _json_response, reply, body, size=size)


def _json_response(reply: Mapping[str, Any], body: RequestBody) -> Response:
    text = "".join(_json_parts(reply))
    return Response(text, headers=_report_header(body), media_type="application/json")


def _json_parts(value: Any) -> Iterator[str]:
    """Yield the JSON text of a value in parts of at most ``_PART`` values each.

    Other threads can run between the parts, not while a part is encoded.
    """
    if _num_values(value, _PART) <= _PART:
        yield _to_json(value)
    elif isinstance(value, dict):
        separator = "{"
        for name, each in value.items():
            yield f"{separator}{_to_json(name)}:"
            yield from _json_parts(each)
            separator = ","
        yield "}"
    else:
        is_flat = not any(isinstance(each, (dict, list)) for each in value)
        separator = "["
        for start in range(0, len(value), _PART if is_flat else 1):
            yield separator
            if is_flat:
                yield _to_json(value[start : start + _PART])[1:-1]
            else:
                yield from _json_parts(value[start])
            separator = ","
        yield "]"


def _num_values(value: Any, limit: int) -> int:
    """Count the values in a JSON value's lists and objects, at all levels.

    The count stops once it exceeds ``limit``.
    """
    number = 0
    waiting = [value]
    while waiting and number <= limit:
        each = waiting.pop()
        if isinstance(each, (dict, list)):
            number += len(each)
            values = each.values() if isinstance(each, dict) else each
            waiting += [inner for inner in values if isinstance(inner, (dict, list))]
    return number


_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _report_header(body: RequestBody) -> dict[str, str]:
    """Return the header that names the ignored parts of a request, if there are any."""
    ignored = body.ignored()
    return {IGNORED_HEADER: report_header(ignored)} if ignored else {}


async def _events(
    chunks: AsyncGenerator[list[dict[str, Any]]],
    first: list[dict[str, Any]],
    path: str,
    form: StreamForm,
) -> AsyncGenerator[str]:
    """Encode the chunks of a reply as a stream.

    ``first`` has the first chunks, which the caller has already taken from ``chunks``. If an error
    occurs, the last event reports it.
    """
    sent = len(first)
    async with aclosing(chunks):
        try:
            yield await _encode(first, form)
            async for chunk in chunks:
                if chunk:
                    yield await _encode(chunk, form)
                    sent += len(chunk)
        except asyncio.CancelledError:  # the server shuts down, or the client has disconnected
            yield await _encode_error(shutting_down(), path, sent, form)
            return
        # The HTTP status is already sent, so that an event reports the error.
        except Exception as error:  # noqa: BLE001
            yield await _encode_error(_logged_error(error), path, sent, form)
            return
        if form == "events":
            yield "data: [DONE]\n\n"


async def _encode_error(error: ApiError, path: str, sent: int, form: StreamForm) -> str:
    """Encode an error as the last part of a stream, in the format of the API at ``path``.

    ``sent`` is the number of events sent before; the Responses API numbers its events.
    """
    body = error.body(path)
    if form == "named events" and path not in ANTHROPIC_PATHS:
        body = {**body["error"], "type": "error", "sequence_number": sent}
    return await _encode([body], form)


async def _encode(events: list[dict[str, Any]], form: StreamForm) -> str:
    """Encode JSON values as parts of a stream; let other requests run between long parts.

    A single event can be long: the last event of a stream may repeat the whole answer.
    """
    parts = list[str]()
    written = 0  # number of characters since other requests last ran
    for event in events:
        if form == "named events":
            parts.append(f"event: {event['type']}\n")
        if form != "lines":
            parts.append("data: ")
        for part in _json_parts(event):
            parts.append(part)
            written += len(part)
            if written > _WRITTEN_AT_ONCE:
                await asyncio.sleep(0)
                written = 0
        parts.append("\n" if form == "lines" else "\n\n")
    return "".join(parts)


async def _error_response(request: Request, error: Exception) -> Response:
    unknown_path = isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND
    api_error = _unknown_path(request.url.path) if unknown_path else _logged_error(error)
    return JSONResponse(
        api_error.body(request.url.path), api_error.status, headers=api_error.headers
    )


def _unknown_path(path: str) -> ApiError:
    return ApiError(HTTPStatus.NOT_FOUND, unknown_path_message(path), "not_found")


def _logged_error(error: Exception) -> ApiError:
    """Convert an exception to an ``ApiError``; log unexpected exceptions."""
    if isinstance(error, RequestValidationError):
        return validation_to_api_error(error.errors(), error.body)
    if isinstance(error, HTTPException):
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        return ApiError(error.status_code, str(error.detail), code, headers=error.headers)
    api_error = to_api_error(error)
    # A ClosedError means that the server shuts down, which needs no entry in the log.
    is_expected = isinstance(error, (ApiError, ClosedError))
    if api_error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not is_expected:
        # The log omits the exception's message, which may quote a prompt. An exception of pronk's
        # own needs no traceback.
        traceback = ""
        if not isinstance(error, PronkError):
            traceback = "\n" + "".join(format_tb(error.__traceback__))
        _log.error("request failed with %s%s", type(error).__name__, traceback)
    return api_error
