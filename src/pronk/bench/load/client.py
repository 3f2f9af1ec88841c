"""The client that sends requests to OpenAI-compatible servers and reads their streams.

It shares the machine with the servers that it measures, so it does little for each chunk: a look at the clock before
anything else, then one cut into events and one parse of JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Self

from pronk.bench.load.answers import (
    CUT_OFF,
    NO_CONNECTION,
    NO_STREAM,
    NOT_PROTOCOL,
    TIMED_OUT,
    Answer,
    AnswerError,
    explain,
)
from pronk.bench.load.records import Call
from pronk.bench.load.requests import Server
from pronk.bench.load.sse import EventStream
from pronk.errors import OptionError

try:
    import httpx
except ImportError as error:
    _message = f"server: expected httpx, found none ({error}); pip install 'pronk[serve]'"
    raise OptionError(_message) from error

__all__ = ["Client", "Sending"]

_PATHS = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True)
class Sending:
    """A request on its way.

    Attributes:
        id: the prompt's.
        body: what is sent.
        due: when it is to be sent, by the clock.
        origin: what records count ``due`` from.
        max_tokens: of the request.
    """

    id: str
    body: bytes
    due: float
    origin: float
    max_tokens: int


class Client:
    """Connections to servers; use it in ``async with``.

    Args:
        endpoint: ``"chat"`` or ``"completions"``.
        timeout: seconds for a whole answer.
        now: the clock, in seconds.
    """

    def __init__(self, endpoint: str, timeout: float, now: Callable[[], float] = perf_counter) -> None:
        self._path = _PATHS[endpoint]
        self._timeout = timeout
        self._now = now
        # A proxy from the environment would be measured with the server.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(None), limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def models(self, server: Server) -> list[str]:
        """The models that a server lists.

        Raises:
            AnswerError: it does not answer, or not with a list.
        """
        try:
            # Some servers close the connection behind an error, just when the next request goes into it.
            headers = _headers(server) | {"Connection": "close"}
            async with asyncio.timeout(self._timeout):
                response = await self._http.get(f"{server.url}/models", headers=headers)
            _check_status(response, response.content)
            return [str(model["id"]) for model in json.loads(response.content)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{server.url}/models has no list of models"
            raise AnswerError(NOT_PROTOCOL, reason) from error
        except (TimeoutError, httpx.HTTPError) as error:
            raise _broken(error) from error

    async def send(self, server: Server, sending: Sending) -> Call:
        """Send a request and read its answer; what fails is a call with an error."""
        sent = self._now()
        try:
            answer = await self.ask(server, sending.body)
        except AnswerError as error:
            now = self._now()
            due = sending.due
            return Call(
                sending.id, due - sending.origin, sent - due, e2e=now - due, error=error.label, reason=error.reason
            )
        return answer.to_call(sending.id, sending.due, sent, sending.origin, sending.max_tokens)

    async def ask(self, server: Server, body: bytes) -> Answer:
        """The answer to a body, to its end.

        Raises:
            AnswerError: it did not come, or not whole.
        """
        answer = Answer()
        try:
            async with asyncio.timeout(self._timeout):
                await self._read(server, body, answer)
        except (TimeoutError, httpx.HTTPError) as error:
            if not answer.done:  # a connection that the server forgets to close has nothing more to say
                raise _broken(error) from error
        answer.check_end()
        return answer

    async def _read(self, server: Server, body: bytes, answer: Answer) -> None:
        url, headers, stream = f"{server.url}{self._path}", _headers(server), EventStream()
        async with self._http.stream("POST", url, content=body, headers=headers) as response:
            kind = response.headers.get("content-type", "")
            if not response.is_success or not kind.startswith("text/event-stream"):
                _check_status(response, await response.aread())
                reason = f"expected text/event-stream, found {kind or 'no type'}"
                raise AnswerError(NO_STREAM, reason)
            async for data in response.aiter_raw():
                at = self._now()
                for event in stream.feed(data):
                    answer.take(event, at)
        for event in stream.close():
            answer.take(event, self._now())


def _headers(server: Server) -> dict[str, str]:
    headers = {
        "Content-Type": "application/json",
        "Accept": "text/event-stream, application/json",
        "Accept-Encoding": "identity",
    }
    return headers | ({} if server.key is None else {"Authorization": f"Bearer {server.key}"})


def _check_status(response: httpx.Response, body: bytes) -> None:
    if not response.is_success:
        label = f"HTTP {response.status_code}"
        raise AnswerError(label, explain(body), response.status_code)


def _broken(error: Exception) -> AnswerError:
    reason = str(error) or type(error).__name__
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return AnswerError(TIMED_OUT)
    if isinstance(error, httpx.ConnectError):
        return AnswerError(NO_CONNECTION, reason)
    return AnswerError(CUT_OFF, reason)
