"""What goes wrong, as OpenAI's interface says it: ``{"error": {"message", "type", "param", "code"}}``."""

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

__all__ = ["ApiError", "of_exception", "of_validation"]

_SHOWN = 300  # characters of a message: it may quote what the client sent


class ApiError(Exception):
    """An answer that is a refusal.

    Attributes:
        status: of HTTP.
        message: expected, found, what to do.
        code: a word for programs.
        param: which field is meant, if it is one.
        headers: to answer with.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = int(status), code, param
        line = " ".join(message.split())
        self.message = line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """As JSON values."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_KNOWN: tuple[tuple[type[Exception], HTTPStatus, str], ...] = (
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
# Of lists and texts, by pydantic's names.
_LENGTHS = {
    "too_short": "expected at least {min_length} in it, found {actual_length}",
    "too_long": "expected at most {max_length} in it, found {actual_length}",
    "string_too_short": "expected at least {min_length} characters, found fewer",
    "string_too_long": "expected at most {max_length} characters, found more",
}
# For OpenAI's clients, which otherwise ask again, once or twice, what has just taken all the time that there is.
_HEADERS: Mapping[type[Exception], Mapping[str, str]] = {
    OverloadedError: {"Retry-After": "1"},
    DeadlineError: {"X-Should-Retry": "false"},
}


def of_exception(error: BaseException) -> ApiError:
    """What a client hears of an error; of one that nobody raised on purpose it learns no more than that."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _KNOWN:
        if isinstance(error, kind):
            field = str(error).partition(":")[0] if kind is OptionError else ""
            return ApiError(status, str(error), code, field if field.isidentifier() else None, _HEADERS.get(kind))
    message = "an error inside the server; its log has the cause"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, "internal_error")


def of_validation(errors: Sequence[Any], body: object) -> ApiError:
    """The first of pydantic's complaints about a body, in our words."""
    # Of several types that were tried the one that fits best got furthest.
    places = [_place([part for part in error["loc"] if part != "body"], body) for error in errors]
    first, names = max(zip(errors, places, strict=True), key=lambda pair: len(pair[1]))
    param = ".".join(names) or None
    kind, code = str(first["type"]), "invalid_value"
    if kind == "extra_forbidden":
        code, message = "unknown_field", "expected only fields that are known here, found this one; leave it out"
    elif kind == "missing":
        message = "expected it, found no such field"
    elif kind in _LENGTHS:
        message = _LENGTHS[kind].format(**first["ctx"])
    elif kind.startswith("json_"):
        param, message = None, "body: expected JSON, found something else"
    else:
        message = first["msg"].removeprefix("Value error, ").replace("Input should be ", "expected ")
        message = message.replace("String should match pattern ", "expected a text of the pattern ")
        message += f", found {_shown(first['input'])}" if ", found " not in message else ""
    return ApiError(HTTPStatus.BAD_REQUEST, f"{param}: {message}" if param else message, code, param)


def _place(parts: Sequence[str | int], body: Any) -> list[str]:
    """Where it is, without what pydantic puts between: which of several types it has tried."""
    names, at = list[str](), body
    for number, part in enumerate(parts, 1):
        if (isinstance(at, list) and part in range(len(at))) or (isinstance(at, dict) and part in at):
            at = at[part]  # type: ignore[index]
        elif part == "[key]" or not (isinstance(at, dict) and number == len(parts)):  # which is missing there
            continue
        names.append(str(part))
    return names


def _shown(value: object) -> str:
    """What kind of JSON value it is; a small one as it is."""
    if isinstance(value, (bool, int, float)) or value is None:
        return f"{json.dumps(value):.40}"
    if isinstance(value, str):
        return f"the text {value!r:.40}"
    return "a list" if isinstance(value, list) else "an object"
