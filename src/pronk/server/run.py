"""Server process: sockets, signals and graceful shutdown, with uvicorn."""

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

# labels of the response counter; any other method counts as "other"
_METHODS = ("GET", "HEAD", "POST")
_POLL_SECONDS = 0.05  # interval at which the shutdown checks whether requests are still running
# Time after which a thread that runs Python code lets another one run; 0.005 by default. The event
# loop waits as long for each of the threads that read requests, several times for one response.
_SWITCH_SECONDS = 0.001
_FLUSH_SECONDS = 1.0  # time limit for clients to read the ends of their responses
# time limit for requests of a stopped engine, which ends its step first, to send an error
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
    signal ends them: those without a response get an error, and streams an event with the error.
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
            models: answer the requests.
            host: address to listen at.
            port: 0 picks a free port.
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
        config = uvicorn.Config(
            Guard(
                make_app(models),
                models.settings,
                num_connections=lambda: len(self.server_state.connections),
                on_response=self._on_response,
            ),
            host=host,
            port=port,
            http=type(
                "HttpProtocol",
                (HttpProtocol,),
                {"limits": limits, "count_response": count_response},
            ),
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

    async def serve(self, sockets: list[socket] | None = None) -> None:
        """Serve until the shutdown; meanwhile, the threads of the process take short turns."""
        with _short_turns(), calm_collections():
            await super().serve(sockets)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start to accept connections.

        Raise ``OptionError`` if the server cannot listen at the address.
        """
        await super().startup(sockets or _listen(self.config.host, self.config.port))
        if self.started:
            self.models.start()
        if self.started and self._on_start is not None:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._on_start(host, port)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Finish running requests, or end them after ``drain_seconds`` or a second signal.

        Meanwhile, new requests get a response with the HTTP status 503. Then close the engines.
        uvicorn's own shutdown is not used: it prints lines of its own, and cancels requests
        without a word to their clients.
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
                connection.shutdown()  # at once, or after the response
            flush_end = perf_counter() + _FLUSH_SECONDS
            await self._wait_until(lambda: not connections, max(end, flush_end))
        finally:
            self.models.stop()
            await self._end_requests()
            if not self.force_exit:
                await self.models.close()

    async def _wait_until(self, done: Callable[[], bool], end: float) -> None:
        """Wait for a condition until a time (``perf_counter``), or the second signal."""
        while not (done() or self.force_exit or perf_counter() >= end):  # noqa: ASYNC110 - as uvicorn
            await asyncio.sleep(_POLL_SECONDS)

    async def _end_requests(self) -> None:
        """Wait for the last responses and events of stopped requests; abort all connections."""
        tasks = [*self.server_state.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        for task in tasks:
            task.cancel()  # without effect on a finished task
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)

    def _on_response(self, scope: Scope, status: int) -> None:
        method = scope["method"]
        route = getattr(scope.get("route"), "path", "none")
        self.models.metrics.count_response(method if method in _METHODS else "other", route, status)
        if self._access_log:
            client = (scope["client"] or ("?",))[0]
            path = scope["raw_path"].decode("latin-1")
            _log.info('%s "%s %s" %d', client, method, path, status)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown at the first signal.

        At the second one, end it without waiting for requests.
        """
        del sig, frame
        self.force_exit = self.should_exit
        self.models.draining = self.should_exit = True

    def stop(self) -> None:
        """Act like a signal, see :meth:`handle_exit`; may be called from any thread."""
        self.handle_exit(signal.SIGTERM, None)


@contextmanager
def _short_turns() -> Iterator[None]:
    """Set the switch interval; restore it at the end."""
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(seconds)


def check_free(host: str, port: int) -> None:
    """Raise ``OptionError`` if a server cannot listen at the address.

    Called before a model is loaded.
    """
    for sock in _listen(host, port):
        sock.close()


def _listen(host: str, port: int) -> list[socket]:
    """Return a listening socket for each address of a host name."""
    try:
        addresses = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)
        return [create_server(address, family=family) for family, *_, address in addresses]
    except OSError as error:
        # cut off the address, which Python appends
        cause = str(error.strerror).partition(" (while")[0]
        msg = (
            f"port: expected an address to listen at, found {host}:{port}: {cause}; choose another"
        )
        raise OptionError(msg) from error
