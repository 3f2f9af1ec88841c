"""The server process: sockets, signals and graceful shutdown, on top of uvicorn."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import AI_PASSIVE, SOCK_STREAM, create_server, getaddrinfo, socket
from time import perf_counter
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import Scope

from pronk import OptionError
from pronk.server.app import make_app
from pronk.server.garbage import calm_collections
from pronk.server.guard import Guard
from pronk.server.http_protocol import HttpProtocol
from pronk.server.model_pool import ModelPool

_log = logging.getLogger("pronk.server.access")

# Methods that the response counter tells apart; any other method counts as "other".
_METHODS = ("GET", "HEAD", "POST")
_POLL_SECONDS = 0.05  # interval at which the shutdown checks whether requests are still running
# Python's switch interval: the time after which a thread that runs Python code lets another one
# run; 0.005 by default. For one response, the event loop waits this long several times for each of
# the threads that read requests.
_SWITCH_SECONDS = 0.001
_FLUSH_SECONDS = 1.0  # time limit for clients to read the ends of their responses
# Time limit for the requests of a stopped engine, which ends its step first, to send an error.
_STOP_SECONDS = 1.0
_CANCEL_SECONDS = 1.0  # time limit for cancelled requests to send an error

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

    After the first SIGINT or SIGTERM, running requests finish and new ones are refused. The second
    signal ends the running requests with an error: as the response, or as the last event of a
    stream.
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
        on_wait: Callable[[int], None] | None = None,
    ) -> None:
        """Configure the server.

        Args:
            models: models that answer the requests.
            host: name or address to listen at.
            port: port to listen at; 0 picks a free one.
            drain_seconds: time limit for running requests after the first signal.
            access_log: log client, route and status of each request; texts are never logged.
            on_start: called with the address and the port as soon as connections are accepted.
            on_wait: called after the first signal with the number of running requests, if there are
                any.
        """
        self.models = models
        self._on_start = on_start
        self._on_wait = on_wait
        self._access_log = access_log
        self._drain_seconds = drain_seconds
        limits = models.settings.limits
        count_response = models.metrics.count_response
        guard = Guard(
            make_app(models),
            models.settings,
            num_connections=lambda: len(self.server_state.connections),
            on_response=self._on_response,
        )
        # uvicorn creates the protocol objects itself. A subclass passes these values to them, as
        # class attributes.
        protocol_values = {"limits": limits, "count_response": count_response}
        protocol = type("HttpProtocol", (HttpProtocol,), protocol_values)
        config = uvicorn.Config(
            guard,
            host=host,
            port=port,
            http=protocol,
            ws="none",
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            access_log=False,  # uvicorn would also log the query strings of requests
            log_config=_LOG,
            log_level="error",
            h11_max_incomplete_event_size=2 * limits.headers,
        )
        super().__init__(config)

    async def serve(self, sockets: list[socket] | None = None) -> None:
        """Serve until the shutdown, with a short switch interval of Python's threads."""
        with _short_turns(), calm_collections():
            await super().serve(sockets)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start to accept connections.

        Raises:
            OptionError: the server cannot listen at the address.
        """
        await super().startup(sockets or _listen(self.config.host, self.config.port))
        if self.started:
            self.models.start()
        if self.started and self._on_start is not None:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._on_start(host, port)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Let running requests finish, within ``drain_seconds`` or until a second signal.

        Meanwhile, new requests get a response with the HTTP status 503. Afterwards the engines are
        closed. uvicorn's own shutdown prints lines of its own and cancels requests without a
        response, so that it is not called.
        """
        del sockets
        end = perf_counter() + self._drain_seconds
        connections = self.server_state.connections
        num_requests = self.models.num_requests
        if num_requests and self._on_wait is not None:
            self._on_wait(num_requests)
        try:
            await self._wait_until(lambda: not self.models.is_busy, end)
            for server in self.servers:
                server.close()
            for connection in [*connections]:
                connection.shutdown()  # closes at once, or after the response in progress
            flush_end = perf_counter() + _FLUSH_SECONDS
            await self._wait_until(lambda: not connections, max(end, flush_end))
        finally:
            self.models.stop()
            await self._end_requests()
            if not self.force_exit:
                await self.models.close()

    async def _wait_until(self, done: Callable[[], bool], end: float) -> None:
        """Wait until ``done()``, the time ``end`` (``perf_counter``), or the second signal."""
        # uvicorn's own shutdown polls in the same way.
        while not (done() or self.force_exit or perf_counter() >= end):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)

    async def _end_requests(self) -> None:
        """Wait for the last responses and events of stopped requests; abort all connections."""
        tasks = [*self.server_state.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        for task in tasks:
            task.cancel()  # a task that is finished ignores this
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)

    def _on_response(self, scope: Scope, status: int) -> None:
        method = scope["method"]
        route = getattr(scope.get("route"), "path", "none")
        label = method if method in _METHODS else "other"
        self.models.metrics.count_response(label, route, status)
        if self._access_log:
            client = (scope["client"] or ("?",))[0]
            path = scope["raw_path"].decode("latin-1")
            _log.info('%s "%s %s" %d', client, method, path, status)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown at the first signal; stop waiting for requests at the second one."""
        del sig, frame
        self.force_exit = self.should_exit
        self.should_exit = True
        self.models.draining = True

    def stop(self) -> None:
        """Act like a signal, see :meth:`handle_exit`; may be called from any thread."""
        self.handle_exit(signal.SIGTERM, None)


@contextmanager
def _short_turns() -> Iterator[None]:
    """Set Python's switch interval to ``_SWITCH_SECONDS``; restore it at the end."""
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(seconds)


def check_free(host: str, port: int) -> None:
    """Raise ``OptionError`` if a server cannot listen at an address.

    The check comes before the load of a model, which may take minutes.
    """
    for sock in _listen(host, port):
        sock.close()


def _listen(host: str, port: int) -> list[socket]:
    """Return a listening socket for each address of a host name."""
    try:
        addresses = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)
        return [create_server(address, family=family) for family, *_, address in addresses]
    except OSError as error:
        # Python's text ends with the address in brackets, which the message below names, too.
        cause = str(error.strerror).partition(" (while")[0]
        msg = (
            f"port: expected an address to listen at, found {host}:{port}: {cause}; choose another"
        )
        raise OptionError(msg) from error
