"""What stands between the network and the app: keys, sizes, times, and clients that leave."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from pronk.server.errors import ApiError
from pronk.server.settings import ServerSettings

__all__ = ["OPEN", "SCRIPTS", "Guard", "tenant_of"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Modules of the page at ``/``.
SCRIPTS = tuple(
    f"/{name}.js"
    for name in ("page", "answer", "candidates", "dom", "figures", "settings", "sources", "stream", "turn", "verdict")
)
# Nothing of anybody is behind them: the state of the server, and the page's own files.
PROBES = ("/health", "/ready")
OPEN = frozenset({*PROBES, "/", "/page.css", *SCRIPTS})


class Guard:
    """Lets requests through to an app, one by one.

    The body is read here, whole and in time, before the app hears of the request; while the app works on it, the guard
    listens for the client's leaving, and cancels the work at once.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        *,
        connections: Callable[[], int] = lambda: 0,
        answered: Callable[[Scope, int], None] = lambda _scope, _status: None,
    ) -> None:
        """Stand before an app.

        Args:
            app: it.
            settings: what is let through.
            connections: how many are open.
            answered: told of every request with which status it was answered.
        """
        self._app = app
        self._settings = settings
        self._connections = connections
        self._answered = answered
        self._keys = [_digest(key) for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def tell(message: Message) -> None:
            nonlocal status
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
                self._answered(scope, status)

        try:
            self._check(scope)
            body = await self._read(scope, receive)
            if body is not None:
                await self._work(scope, body, receive, tell)
        except ApiError as error:
            # The rest of its body is not waited for.
            error.headers["Connection"] = "close"
            await _refuse(tell, error)
        except asyncio.CancelledError:  # the server ends, and with it this task
            if not status:
                message = "expected a server that goes on, found one that is being stopped; ask another"
                await _refuse(tell, ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, "closed"))

    def _check(self, scope: Scope) -> None:
        limits = self._settings.limits
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        if self._connections() > limits.connections:
            msg = f"expected at most {limits.connections} connections at a time; try again later"
            more = {"Retry-After": "1", "Connection": "close"}
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, msg, "too_many_connections", headers=more)
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        size += len(scope["raw_path"]) + len(scope["query_string"])
        if size > limits.headers:
            msg = f"headers: expected at most {limits.headers} bytes, found {size}"
            raise ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, msg, "headers_too_large")
        host = _host(headers.get("host", b""))
        if self._settings.hosts is not None and host not in self._settings.hosts and scope["path"] not in PROBES:
            msg = "host: expected a name that this server is called by; add it with --allow-host"
            raise ApiError(HTTPStatus.MISDIRECTED_REQUEST, msg, "unknown_host")
        scope["pronk.tenant"] = self._tenant(scope["path"], headers.get("authorization", b""))
        kind = headers.get("content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            # Other types are what a page of another site may send without asking.
            msg = "Content-Type: expected application/json, found another, or none"
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, msg, "unsupported_media_type")

    def _tenant(self, path: str, authorization: bytes) -> str:
        """Who asks, by the key: a digest of it, or nothing where no key is asked for."""
        if not self._keys:
            return ""
        kind, _, given = authorization.partition(b" ")
        digest = _digest(given.strip().decode("latin-1"))
        # All of them are compared, each in constant time, so that the time says nothing of any.
        known = sum(hmac.compare_digest(digest, key) for key in self._keys) > 0 and kind.lower() == b"bearer"
        if not known and path not in OPEN:
            msg = "Authorization: expected 'Bearer KEY' with a key of this server; found none, or another"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(HTTPStatus.UNAUTHORIZED, msg, "invalid_api_key", headers=headers)
        return digest.hex() if known else ""

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; ``None`` if the client has left."""
        limit = self._settings.limits.body
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._settings.limits.receive_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            msg = f"expected the body within {self._settings.limits.receive_seconds:g} s; send it faster"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, msg, "slow_body", headers={"Connection": "close"}) from None

    async def _work(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the app answer, until it has, or the client has left."""
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if given:
                return given.pop()
            await asyncio.Event().wait()  # whether the client leaves is the guard's to hear
            raise AssertionError

        work = asyncio.ensure_future(self._app(scope, replay, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, work):
                if not task.done():
                    task.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            # What the app could not answer it has logged, without the message, which may quote a text.
            work.exception()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def tenant_of(scope: Scope) -> str:
    """Who asks, as the guard has found out."""
    return str(scope.get("pronk.tenant", ""))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _host(header: bytes) -> str:
    """The name in a ``Host`` header, without its port."""
    text = header.decode("latin-1").strip().lower()
    return text[: text.find("]") + 1] if text.startswith("[") else text.partition(":")[0]


def _too_large(limit: int) -> ApiError:
    headers = {"Connection": "close"}
    msg = f"body: expected at most {limit} bytes, found more"
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, msg, "body_too_large", headers=headers)


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
