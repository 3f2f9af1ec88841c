"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pronk.errors import (
    CacheFullError,
    ClosedError,
    ContextError,
    DeadlineError,
    OptionError,
    OverloadedError,
    PromptError,
    ResumeError,
    TokenizerError,
)
from pronk.parallel.connection import ConnectionLostError

__all__ = ["ApiError", "to_api_error", "validation_error"]

_MAX_MESSAGE = 300  # characters; a message may quote a long value of the request


class ApiError(Exception):
    """Error response; ``param`` names the invalid field of the request, ``code`` the kind of error."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = int(status), code, param
        line = " ".join(message.split())
        self.message = line if len(line) <= _MAX_MESSAGE else f"{line[: _MAX_MESSAGE - 1]}…"
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the body of the response as JSON values."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_STATUSES: tuple[tuple[type[Exception], HTTPStatus, str], ...] = (
    (ClosedError, HTTPStatus.SERVICE_UNAVAILABLE, "closed"),
    (ResumeError, HTTPStatus.SERVICE_UNAVAILABLE, "not_resumed"),
    (ConnectionLostError, HTTPStatus.SERVICE_UNAVAILABLE, "worker_lost"),
    (OverloadedError, HTTPStatus.TOO_MANY_REQUESTS, "overloaded"),
    (DeadlineError, HTTPStatus.REQUEST_TIMEOUT, "timeout"),
    (CacheFullError, HTTPStatus.BAD_REQUEST, "cache_too_small"),
    (ContextError, HTTPStatus.BAD_REQUEST, "context_length_exceeded"),
    (PromptError, HTTPStatus.BAD_REQUEST, "invalid_prompt"),
    (OptionError, HTTPStatus.BAD_REQUEST, "invalid_value"),
    (TokenizerError, HTTPStatus.BAD_REQUEST, "unsupported_by_tokenizer"),
)
# Pydantic's error type to our message, formatted with pydantic's error context: {"min_length": 1, …}.
_LENGTHS = {
    "too_short": "expected at least {min_length} items, found {actual_length}",
    "too_long": "expected at most {max_length} items, found {actual_length}",
    "string_too_short": "expected at least {min_length} characters, found fewer",
    "string_too_long": "expected at most {max_length} characters, found more",
}
# OpenAI's clients retry after HTTP 408. X-Should-Retry tells them not to: the retry would take as long again.
_HEADERS: Mapping[type[Exception], Mapping[str, str]] = {
    OverloadedError: {"Retry-After": "1"},
    DeadlineError: {"X-Should-Retry": "false"},
}


def to_api_error(error: BaseException) -> ApiError:
    """Convert an exception to an ``ApiError``; hide the message of an exception that is not in ``_STATUSES``."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            field = str(error).partition(":")[0] if kind is OptionError else ""
            return ApiError(status, str(error), code, field if field.isidentifier() else None, _HEADERS.get(kind))
    message = "internal server error; the cause is in the log of the server"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, "internal_error")


def validation_error(errors: Sequence[Any], body: object) -> ApiError:
    """Convert pydantic's errors about a request body to one ``ApiError``.

    For a field with a union type, pydantic returns the errors of every member. The error at the most deeply nested
    field is used, because it belongs to the member that fits best.
    """
    fields = [_field([part for part in error["loc"] if part != "body"], body) for error in errors]
    error, field = max(zip(errors, fields, strict=True), key=lambda pair: len(pair[1]))
    param = ".".join(field) or None
    kind, code = str(error["type"]), "invalid_value"
    if kind == "extra_forbidden":
        code, message = "unknown_field", "expected only known fields, found an unknown one; remove it"
    elif kind == "missing":
        message = "expected a value, found no such field; add it"
    elif kind in _LENGTHS:
        message = _LENGTHS[kind].format(**error["ctx"])
    elif kind.startswith("json_"):
        param, message = None, "body: expected JSON, found something else"
    else:
        message = error["msg"].removeprefix("Value error, ").replace("Input should be ", "expected ")
        message = message.replace("String should match pattern ", "expected a string that matches ")
        message += f", found {_describe(error['input'])}" if ", found " not in message else ""
    return ApiError(HTTPStatus.BAD_REQUEST, f"{param}: {message}" if param else message, code, param)


def _field(location: Sequence[str | int], body: Any) -> list[str]:
    """Return ``["input", "0", "role"]`` for pydantic's location ``("input", "list[Message]", 0, "role")``."""
    names, value = list[str](), body
    for number, part in enumerate(location, 1):
        if (isinstance(value, list) and part in range(len(value))) or (isinstance(value, dict) and part in value):
            value = value[part]  # type: ignore[index]
        elif part == "[key]" or not (isinstance(value, dict) and number == len(location)):
            continue  # the name of a union member; only as the last part, in a dict, it is a missing field
        names.append(str(part))
    return names


def _describe(value: object) -> str:
    if isinstance(value, (bool, int, float)) or value is None:
        return f"{json.dumps(value):.40}"
    if isinstance(value, str):
        return f"the string {value!r:.40}"
    return "a list" if isinstance(value, list) else "an object"
