"""Error responses in the formats of OpenAI, Anthropic and Ollama, and what they report.

OpenAI's format is ``{"error": {"message", "type", "param", "code"}}``; Anthropic's is
``{"type": "error", "error": {"type", "message"}}``, and Ollama's ``{"error": message}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pronk.base import count_text, describe_json_error, errors
from pronk.base.checks import close_choices
from pronk.server.paths import OLLAMA_PATHS

# Routes with errors in Anthropic's format.
ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
# Type of an error in Anthropic's format by HTTP status. Any other status below 500 has the type
# invalid_request_error.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

# Maximum number of characters of a message. Longer messages quote a long value of the request, and
# are cut.
_MAX_MESSAGE = 300


class ApiError(Exception):
    """Error response; ``param`` names the invalid field of the request, ``code`` the cause."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = int(status)
        self.code = code
        # The name of a field may contain half of a surrogate pair, which UTF-8 cannot encode.
        self.param = None if param is None else _encodable(param)
        line = _encodable(" ".join(message.split()))
        self.message = line if len(line) <= _MAX_MESSAGE else f"{line[: _MAX_MESSAGE - 1]}…"
        self.headers = dict(headers or {})

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON body of the response to a request for ``path``."""
        if path.startswith(OLLAMA_PATHS):
            return {"error": self.message}
        is_ours = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        if path in ANTHROPIC_PATHS:
            other = "api_error" if is_ours else "invalid_request_error"
            error_type = _ANTHROPIC_TYPES.get(self.status, other)
            # Claude Code shortens a conversation when a message begins like this.
            too_long = "prompt is too long: " if self.code == "context_length_exceeded" else ""
            error = {"type": error_type, "message": f"{too_long}{self.message}"}
            return {"type": "error", "error": error}
        return {
            "error": {
                "message": self.message,
                "type": "server_error" if is_ours else "invalid_request_error",
                "param": self.param,
                "code": self.code,
            }
        }


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


# Exception class, HTTP status and code. The first match counts, so that a class stands before its
# base class, such as ContextError before PromptError.
_RESPONSES: tuple[tuple[type[Exception], HTTPStatus, str], ...] = (
    (errors.ResumeError, HTTPStatus.SERVICE_UNAVAILABLE, "not_resumed"),
    (errors.ConnectionLostError, HTTPStatus.SERVICE_UNAVAILABLE, "worker_lost"),
    (errors.OverloadedError, HTTPStatus.TOO_MANY_REQUESTS, "overloaded"),
    (errors.DeadlineError, HTTPStatus.REQUEST_TIMEOUT, "timeout"),
    (errors.CacheFullError, HTTPStatus.BAD_REQUEST, "cache_too_small"),
    (errors.ContextError, HTTPStatus.BAD_REQUEST, "context_length_exceeded"),
    (errors.PromptError, HTTPStatus.BAD_REQUEST, "invalid_prompt"),
    (errors.OptionError, HTTPStatus.BAD_REQUEST, "invalid_value"),
    # The request needs what the model's tokenizer lacks, such as a chat template.
    (errors.TokenizerError, HTTPStatus.BAD_REQUEST, "unsupported_by_tokenizer"),
)
# Error message by pydantic's type of the error. :func:`_message_of` fills in the placeholders: with
# values of pydantic's ``ctx``, such as {"actual_length": 0}, and with ``found``, ``minimum`` and
# ``maximum``.
_MESSAGES = {
    "too_short": "expected at least {minimum}, found {actual_length}",
    "too_long": "expected at most {maximum}, found {actual_length}",
    **dict.fromkeys(("model_type", "model_attributes_type"), "expected an object, found {found}"),
    "string_too_short": "expected at least {minimum}, found fewer",
    "string_too_long": "expected at most {maximum}, found more",
}
# Extra headers by status. OpenAI's clients retry after HTTP 408 unless X-Should-Retry forbids it,
# though a retry would time out, too.
_EXTRA_HEADERS = {
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "1"},
    HTTPStatus.REQUEST_TIMEOUT: {"X-Should-Retry": "false"},
}

# Maximum depth of nested lists and objects in a body. The functions that read a body are recursive,
# and Python limits the depth of recursion.
MAX_LEVELS = 256


def to_api_error(error: BaseException) -> ApiError:
    """Convert an exception to an ``ApiError``.

    An unexpected exception becomes an HTTP status 500 without its message, which may quote a
    prompt.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, errors.ClosedError):
        return shutting_down()
    if isinstance(error, RecursionError):  # only lists and objects of a request nest so deeply
        return too_deep()
    for error_class, status, code in _RESPONSES:
        if isinstance(error, error_class):
            param = None
            if error_class is errors.OptionError:
                # By convention, the message begins with the option's name: ``top_k: expected …``.
                option = str(error).partition(":")[0]
                param = option if option.isidentifier() else None
            return ApiError(status, str(error), code, param, _EXTRA_HEADERS.get(status))
    message = "internal server error; the cause is in the log of the server"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, "internal_error")


def too_deep() -> ApiError:
    """Return the error for a body with lists and objects nested more than ``MAX_LEVELS`` deep."""
    message = f"body: expected values of at most {MAX_LEVELS} levels, found more; make them flatter"
    return ApiError(HTTPStatus.BAD_REQUEST, message, "invalid_value")


def shutting_down() -> ApiError:
    """Return the error for a request that ends because the server shuts down."""
    message = "expected a running server, found one that is shutting down; use another server"
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, "closed")


def unknown_model(name: str, *names: str) -> ApiError:
    """Return the error for a model that is not among ``names``, the models of the server."""
    near = close_choices(name, names)
    hint = f"; did you mean {near}?" if near else ""
    message = f"model: expected {' or '.join(map(repr, names))}, found {name!r:.60}{hint}"
    return ApiError(HTTPStatus.NOT_FOUND, message, "model_not_found", "model")


def malformed_body(error: Exception) -> ApiError:
    """Return the error for a body that is no JSON; ``error`` is the exception of the parser."""
    message = f"body: expected JSON, found {describe_json_error(error)}"
    return ApiError(HTTPStatus.BAD_REQUEST, message, "invalid_value")


def validation_to_api_error(problems: Sequence[Any], body: object) -> ApiError:
    """Convert pydantic's errors about a request body to one ``ApiError``.

    For a field with a union type, pydantic returns the errors of every member. The error at the
    most deeply nested field is used, because it belongs to the member that fits best.
    """
    paths = list[list[str]]()
    for problem in problems:
        is_missing = problem["type"] == "missing"
        paths.append(_field_path(_location(problem), body, is_missing=is_missing))
    problem, path = max(zip(problems, paths, strict=True), key=lambda pair: len(pair[1]))
    param = ".".join(path) or None
    error_type = str(problem["type"])
    code = "invalid_value"
    if error_type in ("unknown_field", "unsupported"):  # raised by pronk.server.protocol.fields
        code = error_type
        message = problem["msg"]
    elif not path and error_type in ("missing", "model_attributes_type", "dict_type", "model_type"):
        found = "none" if body is None and error_type == "missing" else describe_value(body)
        message = f"body: expected a JSON object, found {found}; send one"
    elif error_type == "missing":
        is_null = path == _field_path(_location(problem), body, is_missing=False)
        found = "null; give one" if is_null else "no such field; add it"
        message = f"expected a value, found {found}"
    elif error_type in _MESSAGES:
        message = _message_of(problem)
    else:
        message = problem["msg"].removeprefix("Value error, ")
        message = message.replace("Input should be ", "expected ")
        message = message.replace("String should match pattern ", "expected a string that matches ")
        if ", found " not in message:
            message = f"{message}, found {describe_value(problem['input'])}"
    if param:
        message = name_once(param, message)
    return ApiError(HTTPStatus.BAD_REQUEST, message, code, param)


def _message_of(problem: Mapping[str, Any]) -> str:
    """Return the message for an error of pydantic with a type in ``_MESSAGES``."""
    given = problem["input"]
    context = problem.get("ctx", {})
    thing = "character" if isinstance(given, str) else "item"
    values = {
        "found": describe_value(given),
        "minimum": count_text(context.get("min_length", 0), thing),
        "maximum": count_text(context.get("max_length", 0), thing),
        **context,
    }
    return _MESSAGES[problem["type"]].format(**values)


def name_once(param: str, message: str) -> str:
    """Return ``message`` with the prefix ``"{param}: "``, which is not added a second time.

    ``param`` is the name of the request's field that the message is about.
    """
    return message if message.startswith(f"{param}: ") else f"{param}: {message}"


def _location(problem: Mapping[str, Any]) -> list[str | int]:
    """Return the names and indices that lead from the body to the place of an error.

    An error that :mod:`pronk.server.protocol.fields` raises has the last names of this path in
    ``ctx["field"]``; they are appended to pydantic's ``loc``.
    """
    location = [*problem["loc"]]
    if location and location[0] == "body":  # FastAPI's name for the body
        del location[0]
    return [*location, *problem.get("ctx", {}).get("field", ())]


def _field_path(location: Sequence[str | int], body: Any, *, is_missing: bool) -> list[str]:
    """Return the parts of pydantic's location that are names and indices of the client's body.

    For example ``["input", "0", "role"]`` of ``("input", "list[Message]", 0, "role")``: pydantic
    also names the members of unions. The path ends with the name of a missing field.
    """
    names = list[str]()
    value = body
    for part in location:
        # If `part` is a text, `part in range(len(value))` would compare it with each number,
        # without letting other threads run.
        is_index = isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]
            names.append(str(part))
    if is_missing and isinstance(value, dict) and location[-1] not in value:
        names.append(str(location[-1]))
    return names


def describe_value(value: object) -> str:
    """Describe a value for an error message; of a list or an object, name only the type."""
    if isinstance(value, (bool, int, float)) or value is None:
        return f"{json.dumps(value):.40}"
    if isinstance(value, str):
        return f"the string {value!r:.40}"
    return "a list" if isinstance(value, list) else "an object"
