"""Files of requests, in OpenAI's batch format, through the same service as the server's."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import uuid4

from pydantic import ValidationError

from pronk.errors import OptionError, PronkError
from pronk.files.json_lines import read_json_lines
from pronk.server.errors import ApiError, of_exception, of_validation
from pronk.server.protocol.chat import ChatRequest
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.request import TextRequest
from pronk.server.protocol.responses import ResponsesRequest
from pronk.server.protocol.small_routes import ModerationRequest
from pronk.server.service import Service

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment, unused-ignore]

__all__ = ["BatchLine", "BatchOutput", "answer_line", "read_batch", "run_batch"]

_TEXTS: Mapping[str, type[TextRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
}
_ROUTES = (*_TEXTS, "/v1/moderations")
_BEGINNING = b'{"id": "batch_req_'  # of every answer


class BatchLine(NamedTuple):
    """One request of a batch.

    Attributes:
        custom_id: its name, by which its answer is found.
        url: the route it is for.
        body: what that route takes.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


def read_batch(path: Path) -> Iterator[BatchLine]:
    """The requests of a file.

    Raises:
        OptionError: a line is not as the format has it, or its ``custom_id`` has been there before; or it is no file.
    """
    if path.exists() and not path.is_file():
        msg = f"{path}: expected a file, which is read twice, found something else; write its lines to a file first"
        raise OptionError(msg)
    seen = set[str]()
    for number, row in read_json_lines(path):
        where = f"{path}, line {number}"
        line = _line(row, where)
        if line.custom_id in seen:
            msg = f"{where}: expected a custom_id of its own, found {line.custom_id!r} for the second time"
            raise OptionError(msg)
        seen.add(line.custom_id)
        yield line


def _line(row: Mapping[str, Any], where: str) -> BatchLine:
    for name, fine, wanted in (
        ("custom_id", lambda value: isinstance(value, str) and value and _encodable(value), "a text that is not empty"),
        ("method", lambda value: value == "POST", "'POST'"),
        ("url", lambda value: value in _ROUTES, f"one of {', '.join(_ROUTES)}"),
        ("body", lambda value: isinstance(value, dict), "an object"),
    ):
        if not fine(row.get(name)):
            msg = f"{where}: {name}: expected {wanted}, found {row.get(name)!r:.60}"
            raise OptionError(msg)
    return BatchLine(row["custom_id"], row["url"], row["body"])


def _encodable(text: str) -> bool:
    """JSON can write halves of characters, which no file takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


class BatchOutput:
    """A file of answers, which is this run's alone until it is closed.

    Attributes:
        path: of the file; new answers are written to its end.
        done: ``custom_id`` of the requests that have an answer.
    """

    def __init__(self, path: Path) -> None:
        """Open a file, old or new; half an answer, of a run that was cut off, is taken off its end.

        Raises:
            OptionError: the file is no file of answers, which leaves it as it is; or it cannot be written, or another
                run writes to it.
        """
        self.path, self.done = path, set[str]()
        if path.suffix == ".gz":
            msg = f"{path}: expected a plain file for the answers, found a name that ends with .gz"
            raise OptionError(msg)
        try:
            self._file = path.open("a+b")
        except OSError as error:
            msg = f"{path}: expected a file to write to, found {error.strerror}"
            raise OptionError(msg) from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self.close()
            raise

    def write(self, custom_id: str, status: int, body: Mapping[str, Any]) -> None:
        """Write an answer, whole, and see it to the disk.

        Raises:
            PronkError: there is no room for it.
        """
        request = f"batch_req_{uuid4().hex}"
        response = {"status_code": int(status), "request_id": request, "body": body}
        line = {"id": request, "custom_id": custom_id, "response": response, "error": None}
        try:
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            msg = f"{self.path}: expected room for an answer, found {error.strerror}; the same command goes on there"
            raise PronkError(msg) from error

    def close(self) -> None:
        """Let others write to it."""
        with suppress(OSError):  # what there was no room for
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = f"{self.path}: expected a file of this run's own, found another run that writes to it; wait for it"
            raise OptionError(msg) from error
        except OSError:
            return  # a file system without locks

    def _read(self) -> None:
        end = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line.startswith(_BEGINNING[: len(line)]):
                break
            self.done.add(_answered(line, f"{self.path}, line {number}"))
            end += len(line)
        self._file.truncate(end)


def _answered(line: bytes, where: str) -> str:
    try:
        row = json.loads(line)
        name = row["custom_id"] if "response" in row and line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError, RecursionError):
        name = None
    if not isinstance(name, str):
        msg = f"{where}: expected answers of a batch to go on from, found something else"
        raise OptionError(msg)
    return name


async def run_batch(
    service: Service,
    source: Path,
    answers: BatchOutput,
    *,
    at_a_time: int,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Answer what has no answer yet, and write each answer as it comes.

    Args:
        service: who answers.
        source: the requests.
        answers: where they go.
        at_a_time: requests that are worked on together.
        progress: called with every answer.

    Returns:
        How many were refused.

    Raises:
        PronkError: there is no room for an answer.
    """
    refused = 0
    waiting = (line for line in read_batch(source) if line.custom_id not in answers.done)

    async def work() -> None:
        nonlocal refused
        for line in waiting:
            status, body = await answer_line(service, line)
            answers.write(line.custom_id, status, body)
            refused += status != HTTPStatus.OK
            progress()

    await _all([work() for _ in range(at_a_time)])
    return refused


async def _all(works: list[Awaitable[None]]) -> None:
    """Run them to their end; if one fails, the others are stopped."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def answer_line(service: Service, line: BatchLine) -> tuple[int, dict[str, Any]]:
    """One answer: its status, and its body.

    Raises:
        PronkError: of the service, and not of the request, which has no answer yet.
    """
    try:
        return HTTPStatus.OK, await _reply(service, line)
    except Exception as error:
        found = of_exception(error)
        if found.status == HTTPStatus.SERVICE_UNAVAILABLE or found.code == "overloaded":
            raise
        return found.status, found.body()


async def _reply(service: Service, line: BatchLine) -> dict[str, Any]:
    try:
        if line.url not in _TEXTS:
            return await service.moderate(ModerationRequest.model_validate(line.body))
        ask = _TEXTS[line.url].model_validate(line.body)
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False), line.body) from error
    if ask.stream:
        raise ApiError(HTTPStatus.BAD_REQUEST, "stream: expected false in a batch", "invalid_value", "stream")
    return await service.whole(ask)
