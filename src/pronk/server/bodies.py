"""Parsing and validation of request bodies, in threads, so that the event loop goes on."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from pronk.base import FairExecutor
from pronk.server.errors import (
    MAX_LEVELS,
    ApiError,
    describe_value,
    malformed_body,
    too_deep,
    validation_to_api_error,
)
from pronk.server.guard import objects_of, tenant_of
from pronk.server.json_values import has_more_values, parse_json
from pronk.server.protocol.request import RequestBody
from pronk.server.settings import ServerSettings

_NO_BODY = "expected a JSON object, found none; send one"

B = TypeVar("B", bound=RequestBody)


def validate(kind: type[B], value: Any, objects: list[Any] | None = None) -> B:
    """Return the request body of class ``kind`` that a JSON value describes.

    Args:
        kind: class of the body.
        value: the JSON value.
        objects: list to which all new objects are added, inner ones before outer ones, those of a
            refused body included.

    Raises:
        ApiError: the value is no such body, or has more than ``MAX_LEVELS`` levels.
    """
    if not isinstance(value, dict):
        problem = f"expected a JSON object, found {describe_value(value)}; send one"
        raise _refuse(problem)
    _check_levels(value)
    try:
        return kind.model_validate(value, context=objects)
    except ValidationError as error:
        raise validation_to_api_error(error.errors(include_url=False), value) from error


def _check_levels(value: dict[str, Any]) -> None:
    """Raise ``ApiError`` if lists and objects are nested more than ``MAX_LEVELS`` deep."""
    level: list[Any] = [value]
    for _ in range(MAX_LEVELS):
        inner = list[Any]()
        for each in level:
            values = each.values() if isinstance(each, dict) else each
            inner += [other for other in values if isinstance(other, (dict, list))]
        if not inner:
            return
        level = inner
    raise too_deep()


def _refuse(message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, f"body: {message}", "invalid_value")


class BodyReader:
    """Parses and validates request bodies, all but tiny ones in threads.

    FastAPI itself would parse a body on the event loop, and stop all other requests for seconds.
    """

    def __init__(self, settings: ServerSettings, executor: FairExecutor) -> None:
        self._limits = settings.limits
        self._executor = executor

    async def read(
        self, kind: type[B], data: bytes, tenant: str = "", objects: list[Any] | None = None
    ) -> B:
        """Return the body of class ``kind`` in the bytes of a tenant's request.

        Args:
            kind: class of the body.
            data: JSON text of the body.
            tenant: the tenant.
            objects: list to which all objects of the body are added, see :meth:`Bodies.hold`.

        Raises:
            ApiError: the body is malformed or beyond the limits.
        """
        objects = [] if objects is None else objects
        # The thread has no reference to the body, which would then be freed in one call if the
        # thread dropped its reference last.
        await self._executor.run(tenant, self._read, kind, data, objects, size=len(data))
        body: B = objects[-1]
        body.num_bytes = len(data)
        return body

    def _read(self, kind: type[RequestBody], data: bytes, objects: list[Any]) -> None:
        """Add the objects of a body to a list; the body itself is the last one."""
        if not data.strip():
            raise _refuse(_NO_BODY)
        limit = self._limits.values
        if has_more_values(data, limit):
            problem = f"expected at most {limit} texts, lists and objects, found more; send less"
            raise _refuse(problem)
        try:
            value = parse_json(data.decode("utf-8-sig"), objects=objects)
        except RecursionError as error:
            raise too_deep() from error
        except ValueError as error:
            raise malformed_body(error) from error
        validate(kind, value, objects)


class BodyRoute(APIRoute):
    """FastAPI route with a body that the :class:`BodyReader` at ``app.state.bodies`` parses."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the coroutine function that answers a request."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind = self.body_field.field_info.annotation

        async def read_and_handle(request: Request) -> Response:
            data = await request.body()
            scope = request.scope
            reader = request.app.state.bodies
            body = await reader.read(kind, data, tenant_of(scope), objects_of(scope))
            return await handle(_ReadRequest(request.scope, body))

        return read_and_handle


class _ReadRequest(Request):
    """Request whose body is already parsed: ``json()`` returns an object of the route's class.

    FastAPI passes such an object to the route as it is, and does not validate it again.
    """

    def __init__(self, scope: Scope, body: RequestBody) -> None:
        super().__init__(scope)
        self._read_body = body

    async def body(self) -> bytes:
        return b"{}"  # any text that is not empty, so that FastAPI calls json()

    async def json(self) -> RequestBody:
        return self._read_body
