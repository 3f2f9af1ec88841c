"""Batch files in OpenAI's format: a :class:`Service` answers the requests in a file."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Self
from uuid import uuid4

from pronk import LLM, AsyncLLM, OptionError, PronkError
from pronk.base import check_regular, describe_json_error, describe_reason, read_json_lines
from pronk.server.bodies import validate
from pronk.server.errors import to_api_error
from pronk.server.protocol.chat import ChatRequest
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.request import RequestBody, TextRequest, refuse
from pronk.server.protocol.responses import ResponsesRequest
from pronk.server.protocol.small_routes import (
    EmbeddingRequest,
    ModerationRequest,
    RerankRequest,
)
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings

try:
    import fcntl
except ImportError:  # Windows has no fcntl
    fcntl = None  # type: ignore[assignment, unused-ignore]

_BODIES: Mapping[str, type[RequestBody]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/moderations": ModerationRequest,
    "/v1/rerank": RerankRequest,
}
_LINE_START = b'{"id": "batch_req_'  # first bytes of every line of the output file


class BatchLine(NamedTuple):
    """One request of a batch file."""

    custom_id: str  # the client's id of the request, unique in the file; copied to the answer
    url: str  # route, such as /v1/completions
    body: dict[str, Any]


def read_batch(path: Path) -> Iterator[BatchLine]:
    """Yield the requests of a JSON Lines file.

    Raises:
        OptionError: the file cannot be read, a line is malformed, or a ``custom_id`` repeats.
    """
    try:
        check_regular(path)  # an open pipe can be read only once
    except OSError as error:
        found = f"{describe_reason(error)}, which cannot be read twice"
        msg = f"{path}: expected a file, found {found}; write its lines to a file first"
        raise OptionError(msg) from error
    seen = set[str]()
    for number, row in read_json_lines(path):
        where = f"{path}, line {number}"
        line = _parse_line(row, where)
        if line.custom_id in seen:
            msg = (
                f"{where}: expected a unique custom_id, found {line.custom_id!r} for the second "
                "time; rename one"
            )
            raise OptionError(msg)
        seen.add(line.custom_id)
        yield line


def _parse_line(row: Mapping[str, Any], where: str) -> BatchLine:
    for name, is_valid, expected in (
        ("custom_id", _is_id, "a string that is not empty"),
        ("method", lambda value: value == "POST", "'POST'"),
        ("url", lambda value: value in _BODIES, f"one of {', '.join(_BODIES)}"),
        ("body", lambda value: isinstance(value, dict), "an object"),
    ):
        if not is_valid(row.get(name)):
            msg = f"{where}: {name}: expected {expected}, found {row.get(name)!r:.60}"
            raise OptionError(msg)
    return BatchLine(row["custom_id"], row["url"], row["body"])


def _is_id(value: object) -> bool:
    """Return whether a value is a non-empty string that UTF-8 can encode (no lone surrogates)."""
    if not isinstance(value, str) or value == "":
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


class BatchOutput:
    """Output file of a batch, locked until it is closed.

    Attributes:
        path: path of the file; answers are appended.
        answered_ids: ``custom_id`` of each request that an earlier run answered.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file; remove an incomplete last line of an interrupted run.

        Raises:
            OptionError: the file has lines that are no answers (it is left unchanged), cannot be
                written, or is locked by another run.
        """
        self.path = path
        self.answered_ids = set[str]()
        if path.suffix == ".gz":
            msg = (
                f"{path}: expected a plain file for the answers, found a name that ends with .gz; "
                "choose another name"
            )
            raise OptionError(msg)
        try:
            check_regular(path)
            self._file = path.open("a+b")
        except OSError as error:
            msg = (
                f"{path}: expected a file to write to, found {describe_reason(error)}; choose "
                "another path"
            )
            raise OptionError(msg) from error
        try:
            self._lock()
            self._read_answers()
        except BaseException:
            self.close()
            raise

    def write(self, custom_id: str, status: int, body: Mapping[str, Any]) -> None:
        """Append an answer and flush it to the disk.

        Raises:
            PronkError: the disk is full or fails.
        """
        request_id = f"batch_req_{uuid4().hex}"
        response = {"status_code": int(status), "request_id": request_id, "body": body}
        line = {"id": request_id, "custom_id": custom_id, "response": response, "error": None}
        text = json.dumps(line, ensure_ascii=False)
        try:
            self._file.write(text.encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            found = f"{self.path}: expected room for an answer, found {describe_reason(error)}"
            msg = f"{found}; free disk space and run the same command again"
            raise PronkError(msg) from error

    def close(self) -> None:
        """Close the file and release its lock."""
        # On a full disk, close() fails like the write() before, which has already raised the error.
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = (
                f"{self.path}: expected one run per file, found another run that writes to it; "
                "wait for its end"
            )
            raise OptionError(msg) from error
        except OSError:
            return  # the file system does not support locks: go on without one

    def _read_answers(self) -> None:
        """Collect the ``custom_id`` of each answer; cut an incomplete line off the file's end."""
        end = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line.startswith(_LINE_START[: len(line)]):
                break
            self.answered_ids.add(_custom_id(line, self.path, number))
            end += len(line)
        self._file.truncate(end)


def _custom_id(line: bytes, path: Path, number: int) -> str:
    """Return the ``custom_id`` of a line of the output file.

    Raises:
        OptionError: the line is no answer of a batch.
    """
    found = "something else"
    name = None
    try:
        row = json.loads(line.rstrip(b"\n"))
        if "response" in row and line.endswith(b"\n"):
            name = row["custom_id"]
    except (ValueError, RecursionError) as error:
        found = describe_json_error(error, number)
    except (TypeError, KeyError):
        pass
    if not isinstance(name, str):
        msg = (
            f"{path}, line {number}: expected answers of a batch, found {found}; "
            "choose another file"
        )
        raise OptionError(msg)
    return name


def batch_service(llm: LLM, name: str) -> Service:
    """Return a service that answers the requests of a batch file with a model named ``name``.

    The limits on the number of requests, the samples per request and the seconds per request are
    so high that no request is refused: the file and the machine belong to the same user.
    """
    limits = RequestLimits(requests=2**20, n=1024, seconds=1e6)
    engine = AsyncLLM(llm, max_requests=limits.requests)
    return Service(engine, ServerSettings(name=name, limits=limits))


async def run_batch(
    service: Service,
    source: Path,
    answers: BatchOutput,
    *,
    max_concurrent: int,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Answer the requests of a file that have no answer yet.

    Args:
        service: answers the requests.
        source: file of requests.
        answers: output file, with the answers of earlier runs.
        max_concurrent: maximum number of requests that run at the same time.
        progress: called after each new answer.

    Returns:
        Number of new answers with an HTTP status other than 200.

    Raises:
        PronkError: an answer cannot be written, or the service fails (see :func:`answer_line`).
    """
    num_failed = 0
    unanswered = (line for line in read_batch(source) if line.custom_id not in answers.answered_ids)

    async def answer_lines() -> None:
        nonlocal num_failed
        for line in unanswered:
            status, body = await answer_line(service, line)
            answers.write(line.custom_id, status, body)
            num_failed += status != HTTPStatus.OK
            progress()

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(max_concurrent):
                workers.create_task(answer_lines())
    except ExceptionGroup as group:
        # Raise only the first error; the TaskGroup has cancelled the other workers.
        first = group.exceptions[0]
        raise first from first.__cause__
    return num_failed


async def answer_line(service: Service, line: BatchLine) -> tuple[int, dict[str, Any]]:
    """Run one request; return the HTTP status and the JSON body that the server would send.

    The server names ignored parts of a request in its header ``X-Pronk-Ignored``. A file has no
    headers, so that the field ``x_pronk_ignored`` of the body lists them.

    Raises:
        PronkError: the service is closed, overloaded, or has lost a worker or replica; a retry may
            succeed.
    """
    try:
        return HTTPStatus.OK, await _reply(service, line)
    except Exception as error:
        api_error = to_api_error(error)
        if api_error.status == HTTPStatus.SERVICE_UNAVAILABLE or api_error.code == "overloaded":
            raise
        return api_error.status, api_error.body()


async def _reply(service: Service, line: BatchLine) -> dict[str, Any]:
    body = validate(_BODIES[line.url], line.body)
    match body:
        case EmbeddingRequest():
            reply = await service.embed(body)
        case ModerationRequest():
            reply = await service.moderate(body)
        case RerankRequest():
            reply = await service.rerank(body)
        case TextRequest(stream=True):
            raise refuse("stream", "expected false in a batch, found true; remove it")
        case _:
            assert isinstance(body, TextRequest)
            reply = await service.complete(body)
    ignored = body.ignored()
    return {**reply, "x_pronk_ignored": ignored} if ignored else reply
