"""HTTP/1.1 connections of the server, with time limits, on top of uvicorn and h11."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from socket import SO_ERROR, SO_SNDBUF, SOL_SOCKET
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pronk.server.errors import ApiError
from pronk.server.settings import RequestLimits

# Bytes of the kernel's send buffer per connection. The buffer is small, because only a full one
# shows that a client does not read.
_SEND_BUFFER = 2**17
_READ_SIZE = 2**14  # maximum number of bytes to parse at a time
# Seconds between two tests whether the client of a half-closed connection has gone.
_PROBE_SECONDS = 0.1
# Limits of a lingering connection, which drops what the client still sends after the last response.
_LINGER_SECONDS = 2.0  # seconds without new data after which the connection is closed
_LINGER_BODIES = 16  # maximum number of dropped bytes, as a multiple of a body's maximum size


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with time limits for clients that send or read slowly.

    A client may close its sending half after a request, and still gets the response. A client
    that is still sending when its request is refused can read the response, because the
    connection lingers: see :meth:`_close`.

    Attributes:
        limits: limits of sizes, times and connections.
        count_response: function of method, route and HTTP status, called for each response that
            the protocol itself sends.
    """

    limits: ClassVar[RequestLimits]
    count_response: ClassVar[Callable[[str, str, int], None]]

    def connection_made(self, transport: Any) -> None:
        """Set up a connection.

        Above the limit, the oldest connection without a request is aborted. Above twice the limit,
        the new connection is aborted.
        """
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._end_idle_connection()
        self.opened = self.loop.time()
        self._socket_transport = transport
        self.transport = _ClosingTransport(transport, self._close)  # type: ignore[assignment]
        # Running timers by name. "head" limits the time in which a request's head must arrive,
        # "write" how long the send buffer may stay full, "end" how long the client may take to
        # read the end of the last response, "linger" the time without new data while the
        # connection lingers. "probe" is the next test of a half-closed connection.
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # Bytes of the current body that are no content: the chunk sizes of the chunked encoding.
        self._chunk_overhead = 0
        self._half_closed = False  # whether the client sends no more, but still reads
        self._num_dropped = 0  # bytes that arrived while the connection lingered
        self._linger_until = 0.0  # the event loop's time after which a lingering connection closes
        if len(self.connections) > 2 * self.limits.connections:
            transport.abort()
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, _SEND_BUFFER)
        self._abort_after("head", self.limits.receive_seconds)

    def _end_idle_connection(self) -> None:
        """Abort the oldest connection on which no whole request has arrived.

        Otherwise idle connections would keep other clients out.
        """
        connections = [each for each in self.connections if isinstance(each, HttpProtocol)]
        idle = [each for each in connections if each is not self and each.cycle is None]
        oldest = min(idle, key=lambda each: each.opened, default=None)
        if oldest is not None:
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse data of the client; drop the data if the last response was sent."""
        for start in range(0, len(data), _READ_SIZE):
            if self.transport.is_closing():
                self._drop(len(data) - start)
                return
            self._parse(data[start : start + _READ_SIZE])
        self._update_head_timer()
        if self.flow.read_paused and not (self.cycle.more_body or self.cycle.response_complete):
            # The client has sent its next request before the response to the current one
            # (pipelining). uvicorn has therefore paused reading, and would not notice that the
            # client disconnects.
            if len(self.conn.trailing_data[0]) > 2 * self.limits.headers:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Parse data; refuse a body in tiny chunks, which are slow to parse."""
        cycle = self.cycle
        if cycle is None or not cycle.more_body:
            self._chunk_overhead = 0
            super().data_received(data)
            return
        before = len(cycle.body)
        super().data_received(data)
        self._chunk_overhead += len(data) - (len(cycle.body) - before)
        maximum = 4 * self.limits.headers
        if self._chunk_overhead > maximum and not self.transport.is_closing():
            self.send_400_response(
                f"body: expected at most {maximum} bytes of chunk sizes, found more; "
                "send larger chunks, or Content-Length"
            )

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with an error in OpenAI's format.

        If a part of another response was sent, only abort the connection.
        """
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        hint = getattr(sys.exception(), "error_status_hint", HTTPStatus.BAD_REQUEST)
        status = HTTPStatus(hint)
        # h11 suggests status 431 (headers too large) also for a body's chunk with too long a size.
        if self.cycle is not None and self.cycle.more_body:
            status = HTTPStatus.BAD_REQUEST
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            message = f"headers: expected at most {self.limits.headers} bytes, found more"
            error = ApiError(status, message, "headers_too_large")
        else:
            error = ApiError(status, msg, "invalid_http")
        body = json.dumps(error.body()).encode()
        head = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        reason = status.phrase.encode()
        response = h11.Response(status_code=status, headers=[*head.items()], reason=reason)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        type(self).count_response("other", "none", status)
        # The malformed data is the body of the request that is running.
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def on_response_complete(self) -> None:
        """Begin with the next request if it has arrived.

        Otherwise wait for the next request, or close the connection if the client has closed its
        sending half.
        """
        super().on_response_complete()
        self._update_head_timer()
        if self._half_closed and self.cycle.response_complete:  # no further request has arrived
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's data; return whether the connection stays open.

        The client may have closed only its sending half, and wait for its response. If both halves
        are closed, this only shows when the server sends something.
        """
        cycle = self.cycle
        running = cycle is not None and not (cycle.more_body or cycle.response_complete)
        if self.transport.is_closing() or not running:
            return False
        if not self._half_closed:
            self._half_closed = True
            self._start_timer("probe", _PROBE_SECONDS, self._probe)
        return True

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read; called when the send buffer is full."""
        self.flow.pause_writing()
        self._abort_after("write", self.limits.send_seconds)

    def resume_writing(self) -> None:
        """Let the application write again; called when the client has read from the send buffer."""
        self.flow.resume_writing()
        self._stop_timer("write")

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the disconnect to the running request, and stop all timers."""
        for name in [*self._timers]:
            self._stop_timer(name)
        super().connection_lost(exc)

    def _probe(self, *, sends: bool = True) -> None:
        """Abort a half-closed connection if the client has closed the other half, too.

        A client that has closed both halves answers data with a reset of the connection. Before
        the response, the data is a status 100 (Continue), which clients of HTTP/1.1 skip. Clients
        of HTTP/1.0 do not know this status, and get none. ``sends=False`` only checks for the
        reset, at intervals of ``_PROBE_SECONDS``.
        """
        knows_probes = self.scope["http_version"] == "1.1"
        if sends and knows_probes and self.conn.our_state is h11.SEND_RESPONSE:
            probe = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(probe) or b"")
        if self._socket_transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR):
            self.transport.abort()
        else:
            self._start_timer("probe", _PROBE_SECONDS, lambda: self._probe(sends=False))

    def _close(self) -> None:
        """Close the connection, so that the client can read the last response.

        A socket that is closed while data arrives resets the connection, and the client may lose
        the response (RFC 9112, section 9.6). Therefore only the sending half is closed if the
        client may still be sending. The connection then lingers: what arrives is dropped, up to
        limits of bytes and time.
        """
        # Abort the connection if the client does not read the end of the response in time.
        self._abort_after("end", self.limits.send_seconds)
        in_body = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        has_more = bool(self.conn.trailing_data[0])
        if self._half_closed or not (in_body or has_more):
            self._socket_transport.close()
            return
        self.transport.lingers = True  # type: ignore[attr-defined]
        self._linger_until = self.loop.time() + self.limits.receive_seconds
        self._start_timer("linger", _LINGER_SECONDS, self._socket_transport.close)
        with suppress(OSError):  # raised if the client has reset the connection
            self._socket_transport.write_eof()
        self._socket_transport.resume_reading()

    def _drop(self, num_bytes: int) -> None:
        """Count data that a lingering connection drops; close the connection beyond the limits."""
        self._num_dropped += num_bytes
        too_many = self._num_dropped > _LINGER_BODIES * self.limits.body
        if too_many or self.loop.time() > self._linger_until:
            self._socket_transport.close()
        else:
            self._start_timer("linger", _LINGER_SECONDS, self._socket_transport.close)

    def _update_head_timer(self) -> None:
        """Start the ``head`` timer for a partial request head; stop it while a request runs."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer("head")
        elif self.conn.trailing_data[0] and "head" not in self._timers:
            self._abort_after("head", self.limits.receive_seconds)

    def _abort_after(self, name: str, seconds: float) -> None:
        self._start_timer(name, seconds, self._socket_transport.abort)

    def _start_timer(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, action)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


class _ClosingTransport:
    """Transport of a connection whose method ``close`` calls a function of the protocol.

    All other methods are those of the wrapped transport.

    Attributes:
        lingers: whether the sending half is closed, and the receiving half is still open.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self._close = close
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether the sending half of the connection is closed or closing."""
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """Send the rest of the buffered data, then close the connection as the protocol does."""
        if not self.is_closing():
            self._close()
