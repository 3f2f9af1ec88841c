"""The process: sockets, signals, and an end in good order, with uvicorn."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable
from http import HTTPStatus
from socket import AI_PASSIVE, SO_SNDBUF, SOCK_STREAM, SOL_SOCKET, create_server, getaddrinfo, socket
from time import perf_counter
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pronk.errors import OptionError
from pronk.server.app import make_app
from pronk.server.errors import ApiError
from pronk.server.guard import Guard, Scope
from pronk.server.service import Service
from pronk.server.settings import RequestLimits

__all__ = ["Server", "check_free"]

_log = logging.getLogger("pronk.server.access")

# Of what is sent, so much may wait in the system for a client to take it: what waits there is not seen to be waiting.
_SEND_BUFFER = 2**17

_METHODS = ("GET", "HEAD", "POST")  # that there are; a client may write any
_SLICE = 2**14  # bytes of HTTP that are read at once
_LOOKS = 0.05  # seconds between looks at whether all is done
_FAREWELL = 1.0  # seconds for last answers, of requests that are cut off

_LOG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        "uvicorn": {"handlers": ["stderr"], "propagate": False},
        "pronk": {"handlers": ["stderr"]},
        "pronk.server.access": {"level": "INFO"},
    },
}


class Server(uvicorn.Server):
    """Serves one model. The first signal drains: what runs is finished, nothing new is taken in; the next one stops."""

    def __init__(
        self,
        service: Service,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        drain_seconds: float = 60.0,
        access_log: bool = False,
        on_start: Callable[[str, int], None] | None = None,
    ) -> None:
        """Prepare to listen.

        Args:
            service: what is served.
            host: the address to listen at.
            port: the port; 0 is any that is free.
            drain_seconds: after which a drain stops what still runs.
            access_log: write a line for each request: who, which route, which status; never a text.
            on_start: told the address and the port, once clients may come.
        """
        self.service = service
        self._on_start = on_start
        self._access_log = access_log
        self._drain_seconds = drain_seconds
        limits = service.settings.limits
        config = uvicorn.Config(
            Guard(
                make_app(service),
                service.settings,
                connections=lambda: len(self.server_state.connections),
                answered=self._answered,
            ),
            host=host,
            port=port,
            http=type("Patient", (_Patient,), {"limits": limits, "refused": service.metrics.answered}),
            ws="none",
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            access_log=False,  # uvicorn's has whatever stands behind the question mark
            log_config=_LOG,
            log_level="error",
            h11_max_incomplete_event_size=2 * limits.headers,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen.

        Raises:
            OptionError: it cannot be listened at the address.
        """
        await super().startup(sockets or _listen(self.config.host, self.config.port))
        if self.started and self._on_start is not None:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._on_start(host, port)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Wait for what runs, or cut it off, and let the model's thread end.

        Meanwhile clients may still come, to be told to ask elsewhere.
        """
        ends_at = perf_counter() + self._drain_seconds
        try:
            while self.service.busy and not self.force_exit and perf_counter() < ends_at:  # noqa: ASYNC110 - as uvicorn
                await asyncio.sleep(_LOOKS)
            self.config.timeout_graceful_shutdown = max(1, round(ends_at - perf_counter()))
            await super().shutdown(sockets)
        finally:
            self.service.close()
            await self._cut_off()
            if not self.force_exit:
                await self.service.engine.close()

    async def _cut_off(self) -> None:
        """End what still runs. Whoever does not take its answer, which its task would wait for, is left without."""
        tasks = [*self.server_state.tasks]
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_FAREWELL)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=_FAREWELL)

    def _answered(self, scope: Scope, status: int) -> None:
        method, route = scope["method"], getattr(scope.get("route"), "path", "none")
        self.service.metrics.answered(method if method in _METHODS else "other", route, status)
        if self._access_log:
            client, path = (scope["client"] or ("?",))[0], scope["raw_path"].decode("latin-1")
            _log.info('%s "%s %s" %d', client, scope["method"], path, status)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: drain, or, if that has begun, stop."""
        del sig, frame
        self.force_exit = self.should_exit
        self.service.draining = self.should_exit = True

    def stop(self) -> None:
        """What a signal does, from any thread."""
        self.handle_exit(signal.SIGTERM, None)


def check_free(host: str, port: int) -> None:
    """See whether an address is to be had, before a model is loaded for it.

    Raises:
        OptionError: it cannot be listened at.
    """
    for each in _listen(host, port):
        each.close()


def _listen(host: str, port: int) -> list[socket]:
    """At every address of a name."""
    try:
        found = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)
        return [create_server(address, family=family) for family, *_, address in found]
    except OSError as error:
        cause = str(error.strerror).partition(" (while")[0]  # Python adds what it was doing
        msg = f"port: expected an address to listen at, found {host}:{port}: {cause}; choose another"
        raise OptionError(msg) from error


class _Patient(H11Protocol):
    """uvicorn's, with clients cut off that do not send the head of a request, or do not take what they are sent."""

    limits: ClassVar[RequestLimits]
    refused: ClassVar[Callable[[str, str, int], None]]  # told the method, the route, and the status

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._wrapping = 0  # bytes of the body that came and are not of it: lengths of chunks
        if len(self.connections) > 2 * self.limits.connections:
            transport.abort()
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, _SEND_BUFFER)
        self._wait("head", self.limits.receive_seconds)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE):
            if not self.transport.is_closing():
                self._take(data[start : start + _SLICE])
        self._watch_head()
        if self.flow.read_paused and not (self.cycle.more_body or self.cycle.response_complete):
            # The next request waits for this one; but whether the client leaves is to be heard meanwhile.
            if len(self.conn.trailing_data[0]) > 2 * self.limits.headers:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def _take(self, data: bytes) -> None:
        """Read a little, and cut off who sends a body in crumbs: each costs more to take up than it holds."""
        cycle = self.cycle
        if cycle is None or not cycle.more_body:
            self._wrapping = 0
            super().data_received(data)
            return
        before = len(cycle.body)
        super().data_received(data)
        self._wrapping += len(data) - (len(cycle.body) - before)
        if self._wrapping > 4 * self.limits.headers:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Damaged HTTP, or too much of it; where an answer has begun, another cannot follow."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        status = HTTPStatus(getattr(sys.exception(), "error_status_hint", HTTPStatus.BAD_REQUEST))
        large = status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        message = f"headers: expected at most {self.limits.headers} bytes, found more" if large else msg
        error = ApiError(status, message, "headers_too_large" if large else "invalid_http")
        body = json.dumps(error.body()).encode()
        head = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        for event in (
            h11.Response(status_code=status, headers=[*head.items()], reason=status.phrase.encode()),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        type(self).refused("other", "none", status)
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._wait("end", self.limits.send_seconds)  # closing waits for the client to take the rest

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self._wait("write", self.limits.send_seconds)

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self._cancel("write")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in [*self._timers]:
            self._cancel(name)
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        """The head of the next request may have begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel("head")
        elif self.conn.trailing_data[0] and "head" not in self._timers:
            self._wait("head", self.limits.receive_seconds)

    def _wait(self, name: str, seconds: float) -> None:
        self._cancel(name)
        self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _cancel(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()
