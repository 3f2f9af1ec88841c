"""Server process: sockets, signals and graceful shutdown, with uvicorn."""

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
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from pronk.errors import OptionError
from pronk.server.app import make_app
from pronk.server.errors import ApiError
from pronk.server.guard import Guard
from pronk.server.model_pool import ModelPool
from pronk.server.settings import RequestLimits

_log = logging.getLogger("pronk.server.access")

# Bytes of the kernel's send buffer per connection; few, because only a full buffer shows that a client does not read.
_SEND_BUFFER = 2**17

_METHODS = ("GET", "HEAD", "POST")  # labels of the response counter; any other method counts as "other"
_READ_SIZE = 2**14  # maximum number of bytes to parse at a time
_POLL_SECONDS = 0.05  # interval at which the shutdown checks whether requests are still running
_CANCEL_SECONDS = 1.0  # time limit for cancelled requests to send an error response

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
    """HTTP server of the models of a pool.

    After the first SIGINT or SIGTERM, running requests finish and new ones are refused. The second signal cancels them.
    """

    def __init__(
        self,
        models: ModelPool,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        drain_seconds: float = 60.0,
        access_log: bool = False,
        on_start: Callable[[str, int], None] | None = None,
    ) -> None:
        """Configure the server.

        Args:
            models: answer the requests.
            host: address to listen at.
            port: 0 picks a free port.
            drain_seconds: time limit for running requests after the first signal.
            access_log: log client, route and status of each request; texts are never logged.
            on_start: called with the address and the port as soon as connections are accepted.
        """
        self.models = models
        self._on_start = on_start
        self._access_log = access_log
        self._drain_seconds = drain_seconds
        limits, count_response = models.settings.limits, models.metrics.count_response
        config = uvicorn.Config(
            Guard(
                make_app(models),
                models.settings,
                num_connections=lambda: len(self.server_state.connections),
                on_response=self._on_response,
            ),
            host=host,
            port=port,
            http=type("HttpProtocol", (_HttpProtocol,), {"limits": limits, "count_response": count_response}),
            ws="none",
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            access_log=False,  # uvicorn would also log the query string
            log_config=_LOG,
            log_level="error",
            h11_max_incomplete_event_size=2 * limits.headers,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start to accept connections; raise ``OptionError`` if the server cannot listen at the address."""
        await super().startup(sockets or _listen(self.config.host, self.config.port))
        if self.started:
            self.models.start()
        if self.started and self._on_start is not None:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._on_start(host, port)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Finish running requests, cancel them after ``drain_seconds`` or a second signal; close the engines.

        Meanwhile, new requests get a response with the HTTP status 503.
        """
        end = perf_counter() + self._drain_seconds
        try:
            while self.models.is_busy and not self.force_exit and perf_counter() < end:  # noqa: ASYNC110 - as uvicorn
                await asyncio.sleep(_POLL_SECONDS)
            self.config.timeout_graceful_shutdown = max(1, round(end - perf_counter()))
            await super().shutdown(sockets)
        finally:
            self.models.stop()
            await self._cancel_requests()
            if not self.force_exit:
                await self.models.close()

    async def _cancel_requests(self) -> None:
        """Cancel running requests, wait for their last responses, then abort all connections."""
        tasks = [*self.server_state.tasks]
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)

    def _on_response(self, scope: Scope, status: int) -> None:
        method, route = scope["method"], getattr(scope.get("route"), "path", "none")
        self.models.metrics.count_response(method if method in _METHODS else "other", route, status)
        if self._access_log:
            client, path = (scope["client"] or ("?",))[0], scope["raw_path"].decode("latin-1")
            _log.info('%s "%s %s" %d', client, method, path, status)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown at the first signal; at the second one, end it without waiting for requests."""
        del sig, frame
        self.force_exit = self.should_exit
        self.models.draining = self.should_exit = True

    def stop(self) -> None:
        """Act like a signal, see :meth:`handle_exit`; may be called from any thread."""
        self.handle_exit(signal.SIGTERM, None)


def check_free(host: str, port: int) -> None:
    """Raise ``OptionError`` if a server cannot listen at the address; called before a model is loaded."""
    for sock in _listen(host, port):
        sock.close()


def _listen(host: str, port: int) -> list[socket]:
    """Return a listening socket for each address of a host name."""
    try:
        addresses = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)
        return [create_server(address, family=family) for family, *_, address in addresses]
    except OSError as error:
        cause = str(error.strerror).partition(" (while")[0]  # cut off the address, which Python appends
        msg = f"port: expected an address to listen at, found {host}:{port}: {cause}; choose another"
        raise OptionError(msg) from error


class _HttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which also aborts connections of clients that send or read too slowly."""

    limits: ClassVar[RequestLimits]
    count_response: ClassVar[Callable[[str, str, int], None]]  # called with method, route and HTTP status

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Timers that abort the connection, by name: "head" of a request, blocked "write", "end" of the last response.
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._chunk_overhead = 0  # bytes of the current body that are not content: chunk sizes of the chunked encoding
        if len(self.connections) > 2 * self.limits.connections:
            transport.abort()
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, _SEND_BUFFER)
        self._start_timer("head", self.limits.receive_seconds)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _READ_SIZE):
            if not self.transport.is_closing():
                self._parse(data[start : start + _READ_SIZE])
        self._update_head_timer()
        if self.flow.read_paused and not (self.cycle.more_body or self.cycle.response_complete):
            # The next request waits for the end of this one. uvicorn has paused reading, and would miss a disconnect.
            if len(self.conn.trailing_data[0]) > 2 * self.limits.headers:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Parse ``data``; abort the connection if its body consists of tiny chunks, which are slow to parse."""
        cycle = self.cycle
        if cycle is None or not cycle.more_body:
            self._chunk_overhead = 0
            super().data_received(data)
            return
        before = len(cycle.body)
        super().data_received(data)
        self._chunk_overhead += len(data) - (len(cycle.body) - before)
        if self._chunk_overhead > 4 * self.limits.headers:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with an error in OpenAI's format, unless a response was already sent in part."""
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
        type(self).count_response("other", "none", status)
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_head_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_timer("end", self.limits.send_seconds)  # aborts if the client does not read the end of the response

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self._start_timer("write", self.limits.send_seconds)

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self._stop_timer("write")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in [*self._timers]:
            self._stop_timer(name)
        super().connection_lost(exc)

    def _update_head_timer(self) -> None:
        """Start the ``head`` timer if a request's head has arrived in part; stop it while a request runs."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer("head")
        elif self.conn.trailing_data[0] and "head" not in self._timers:
            self._start_timer("head", self.limits.receive_seconds)

    def _start_timer(self, name: str, seconds: float) -> None:
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()
