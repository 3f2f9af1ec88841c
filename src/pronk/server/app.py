"""The routes, with FastAPI."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from importlib.resources import files
from traceback import format_tb
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pronk import __version__
from pronk.errors import PronkError
from pronk.server.errors import ApiError, of_exception, of_validation
from pronk.server.guard import SCRIPTS, tenant_of
from pronk.server.protocol.chat import ChatRequest
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.request import TextRequest
from pronk.server.protocol.responses import ResponsesRequest
from pronk.server.protocol.small_routes import DetokenizeRequest, ModerationRequest, TokenizeRequest
from pronk.server.service import Service

__all__ = ["make_app"]

_log = logging.getLogger(__name__)

# Nothing from elsewhere, nothing inline, no frames around the page, and no other site learns where one came from.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}
_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{path: (path[1:], "text/javascript") for path in SCRIPTS},
}


class ErrorDetail(BaseModel):
    """What was expected, what was found, and which field is meant."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """Every refusal's body."""

    error: ErrorDetail


_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 415, 421, 429, 431, 500, 503)
}


def make_app(service: Service) -> FastAPI:
    """The app of one model."""
    app = FastAPI(
        title="pronk",
        version=__version__,
        docs_url=None,  # their pages fetch scripts from elsewhere
        redoc_url=None,
        responses=_REFUSALS,
        redirect_slashes=False,
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    for kind in (ApiError, PronkError, Exception):
        app.add_exception_handler(kind, _failed)
    _add_state(app, service)
    _add_texts(app, service)
    _add_others(app, service)
    if service.settings.page:
        _add_page(app)
    return app


def _add_state(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The server is there."""
        return {"status": "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """The server takes requests."""
        if service.draining or not service.engine.alive:
            return JSONResponse({"status": "ending"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """What happens, for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that there is."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model, by its name."""
        if name != service.settings.name:
            message = f"model: expected {service.settings.name!r}, found {name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, "model_not_found", "model")
        return _model(service)


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, ask: CompletionRequest) -> Response:
        """Continue texts."""
        return await _reply(service, request, ask)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, ask: ChatRequest) -> Response:
        """Answer a conversation."""
        return await _reply(service, request, ask)

    @app.post("/v1/responses", response_model=None)
    async def responses(request: Request, ask: ResponsesRequest) -> Response:
        """Answer a conversation, in OpenAI's newer form."""
        return await _reply(service, request, ask, named=True)


def _add_others(app: FastAPI, service: Service) -> None:
    @app.post("/v1/moderations")
    async def moderations(request: Request, ask: ModerationRequest) -> dict[str, Any]:
        """Say to which category texts belong, by the model's own judgement."""
        _check_open(service)
        return await service.moderate(ask, tenant_of(request.scope))

    @app.post("/tokenize", response_model=None)
    async def tokenize(ask: TokenizeRequest) -> Response:
        """Token ids of a text or a conversation."""
        _check_open(service)
        return await asyncio.to_thread(JSONResponse, await service.tokenize(ask))

    @app.post("/detokenize", response_model=None)
    async def detokenize(ask: DetokenizeRequest) -> Response:
        """The text of token ids."""
        _check_open(service)
        return await asyncio.to_thread(JSONResponse, await service.detokenize(ask))


def _add_page(app: FastAPI) -> None:
    folder = files("pronk.server") / "page"
    for path, (name, kind) in _PAGE.items():
        page = Response((folder / name).read_bytes(), media_type=kind, headers=PAGE_HEADERS)
        app.add_api_route(path, lambda page=page: page, response_model=None, include_in_schema=False)


def _model(service: Service) -> dict[str, Any]:
    llm = service.engine.llm
    return {
        "id": service.settings.name,
        "object": "model",
        "created": 0,
        "owned_by": "pronk",
        "max_model_len": llm.config.context,
        "drafter": llm.get_proposer().name,
        "drafters": [*service.settings.drafters],  # with files of their own, which requests may ask for
    }


async def _reply(service: Service, request: Request, ask: TextRequest, *, named: bool = False) -> Response:
    """One body, or a stream of events; ``named`` events say their type in a line of their own."""
    _check_open(service)
    tenant = tenant_of(request.scope)
    if not ask.stream:
        return await asyncio.to_thread(JSONResponse, await service.whole(ask, tenant))
    chunks = service.chunks(ask, tenant)
    first = await anext(chunks)  # what is wrong with the request shows here, while there is a status to say it with
    events = _events(chunks, first, named=named)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(
    chunks: AsyncGenerator[list[dict[str, Any]]], first: list[dict[str, Any]], *, named: bool
) -> AsyncGenerator[str]:
    """Server-sent events; a failure in the midst of a stream is an event of its own."""
    sent = len(first)
    async with aclosing(chunks):
        try:
            yield _encode(first, named=named)
            async for chunk in chunks:
                if chunk:
                    yield _encode(chunk, named=named)
                    sent += len(chunk)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client hears of it
            body = _api_error(error).body()
            event = {**body["error"], "type": "error", "sequence_number": sent} if named else body
            yield _encode([event], named=named)
            return
        if not named:
            yield "data: [DONE]\n\n"


def _encode(events: list[dict[str, Any]], *, named: bool) -> str:
    head = "event: {type}\n" if named else ""
    lines = [
        f"{head.format(**event)}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"
        for event in events
    ]
    return "".join(lines)


def _check_open(service: Service) -> None:
    if service.draining:
        message = "expected a server that goes on, found one that is being stopped; ask another"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, "draining", headers={"Retry-After": "5"})


def _api_error(error: BaseException) -> ApiError:
    found = of_exception(error)
    if found.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, ApiError):
        # By its kind and its places: its message may quote a text.
        places = "".join(format_tb(error.__traceback__))
        _log.error("a request failed with %s\n%s", type(error).__name__, places)
    return found


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _refusal(of_validation(error.errors(), error.body))


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return _refusal(ApiError(error.status_code, str(error.detail), code, headers=error.headers))


async def _failed(_: Request, error: Exception) -> Response:
    return _refusal(_api_error(error))


def _refusal(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)
