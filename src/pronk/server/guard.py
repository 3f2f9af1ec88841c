"""ASGI middleware: checks headers and API keys, limits sizes, and cancels abandoned requests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pronk.base import count_text
from pronk.server.errors import ApiError, shutting_down
from pronk.server.garbage import Bodies
from pronk.server.paths import canonical_path
from pronk.server.protocol.field_report import IGNORED_HEADER
from pronk.server.settings import ServerSettings

# Browsers send at least one of these headers with a request that a page of another origin makes.
_BROWSER_HEADERS = frozenset({"origin", "referer", "sec-fetch-site"})
# Media types that clients set for a body without being asked: none, curl's default, the default of
# fetch() in Node.js. Browsers let a page of another origin send them without a preflight request,
# unlike application/json.
_DEFAULT_TYPES = frozenset({b"", b"application/x-www-form-urlencoded", b"text/plain"})

_SCRIPTS = (
    "page",
    "answer",
    "candidates",
    "code",
    "conversations",
    "dom",
    "figures",
    "highlight.min",
    "inline",
    "markdown",
    "settings",
    "sources",
    "stream",
    "turn",
    "verdict",
)
# Paths of the JavaScript modules of the chat page.
SCRIPT_PATHS = tuple(f"/{name}.js" for name in _SCRIPTS)
# Other files of the chat page: its style, and the licence of highlight.min.js.
STYLE_PATH = "/page.css"
LICENSE_PATH = "/highlight.LICENSE.txt"
# Paths that are served whatever the Host header says, because load balancers call them.
PROBE_PATHS = ("/health", "/ready")
# Paths that need no API key, because their responses contain neither texts nor keys.
PUBLIC_PATHS = frozenset({*PROBE_PATHS, "/", STYLE_PATH, LICENSE_PATH, *SCRIPT_PATHS})


class Guard:
    """ASGI application that checks each request before it runs another application.

    The guard reads the whole body, within a time limit, before it calls the application. If the
    client disconnects while the application runs, the guard cancels the application's task. A
    tenant is all clients with the same API key.

    Pages of ``settings.origins``, and of no other origin, may read the responses (CORS). Without
    origins, no header of CORS is sent.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        num_connections: Callable[[], int] = lambda: 0,
        on_response: Callable[[Scope, int], None] = lambda _scope, _status: None,
    ) -> None:
        """Wrap an ASGI application.

        ``num_connections`` returns the number of open connections. ``on_response`` is called with
        the scope of each request and the HTTP status of its response.
        """
        self._settings = settings
        self._app = self._with_cors(app)
        self._num_connections = num_connections
        self._on_response = on_response
        self._keys = [_digest(key) for key in settings.keys]
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI specifies."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": canonical_path(scope["path"])}
        responding = False

        async def send_and_report(message: Message) -> None:
            nonlocal responding
            await send(message)
            if message["type"] == "http.response.start":
                responding = True
                self._on_response(scope, message["status"])

        try:
            self._check_head(scope)
            body = await self._read_body(scope, receive)
            if body is not None:
                async with self._bodies.hold(len(body)) as objects:
                    scope["pronk.objects"] = objects
                    await self._run(scope, body, receive, send_and_report)
        except ApiError as error:
            error.headers["Connection"] = "close"  # because the rest of the body is not read
            await self._refuse(error, scope, receive, send_and_report)
        except asyncio.CancelledError:  # the server cancels requests when it shuts down
            if not responding:
                await self._refuse(shutting_down(), scope, receive, send_and_report)

    def _with_cors(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application so that pages of the allowed origins can read its responses."""
        if not self._settings.origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=[*self._settings.origins],
            allow_methods=["GET", "POST"],
            # Any request header, because client libraries add headers of their own.
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, "Retry-After"],
        )

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an error response.

        The response has CORS headers, so that pages of the allowed origins can read it. The
        response to a preflight has none, so that the browser refuses the page's request.
        """
        response = error_response(error, scope["path"])
        answer = response if _is_preflight(scope) else self._with_cors(response)
        await answer(scope, receive, send)

    def _check_head(self, scope: Scope) -> None:
        """Check the path and the headers; store the tenant in ``scope`` for :func:`tenant_of`."""
        limits = self._settings.limits
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        is_probe = scope["path"] in PROBE_PATHS
        if self._num_connections() > limits.connections and not is_probe:
            msg = (
                f"expected at most {count_text(limits.connections, 'open connection')}, found "
                "more; try again later"
            )
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                msg,
                "too_many_connections",
                headers={"Retry-After": "1"},
            )
        size = sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
        size += len(scope["raw_path"]) + len(scope["query_string"])
        if size > limits.headers:
            msg = (
                f"headers: expected at most {count_text(limits.headers, 'byte')}, found {size}; "
                "shorten them"
            )
            raise ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, msg, "headers_too_large")
        host = _host(headers.get("host", b""))
        hosts = self._settings.hosts
        if hosts is not None and host not in hosts and not is_probe:
            msg = "Host: expected a name of this server, found another; add it with --allow-host"
            raise ApiError(HTTPStatus.MISDIRECTED_REQUEST, msg, "unknown_host")
        _check_framing(headers, scope["http_version"])
        answers_preflights = bool(self._settings.origins)
        # Browsers send no key with a preflight request.
        if not (answers_preflights and _is_preflight(scope)):
            scope["pronk.tenant"] = self._check_key(scope["path"], _key_of(headers))
        if scope["method"] == "POST":
            scope["headers"] = [*_json_headers(scope["headers"], headers)]

    def _check_key(self, path: str, given: bytes | None) -> str:
        """Return the SHA-256 digest of a valid API key in hexadecimal digits, as the tenant.

        The tenant is ``""`` if the server has no keys, or if ``path`` needs none and no valid one
        is given.

        Raises:
            ApiError: ``path`` needs a valid key, and ``given`` is another or ``None``.
        """
        if not self._keys:
            return ""
        digest = _digest((given or b"").decode("latin-1"))
        # Compare with all keys, each in constant time, so that the duration reveals nothing about a
        # key.
        num_equal = sum(hmac.compare_digest(digest, key) for key in self._keys)
        valid = num_equal > 0 and given is not None
        if not valid and path not in PUBLIC_PATHS:
            msg = (
                "Authorization: expected 'Bearer KEY' with a key of this server, found none or "
                "another; send a key"
            )
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                msg,
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return digest.hex() if valid else ""

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, or ``None`` if the client has disconnected.

        Raises:
            ApiError: the body is too large, or has not arrived within ``receive_seconds``.
        """
        limit = self._settings.limits.body
        length = dict(scope["headers"]).get(b"content-length", b"0")
        # int() refuses very long numbers, and 20 digits are beyond any limit.
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)
        chunks = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.limits.receive_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > limit:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            seconds = self._settings.limits.receive_seconds
            msg = (
                f"body: expected all of it within {seconds:g} s, found only a part; send it faster"
            )
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, msg, "slow_body") from None

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application until it ends or the client disconnects."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            if messages:
                return messages.pop()
            # The event is never set. If the client disconnects, _run() cancels the application.
            await asyncio.Event().wait()
            raise AssertionError

        application = asyncio.ensure_future(self._app(scope, receive_body, send))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({application, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()  # cancel() has no effect on a finished task
            application.cancel()
            await asyncio.wait({application, disconnect})
        # The client has not disconnected: a service that shuts down has cancelled the application.
        if application.cancelled() and disconnect.cancelled():
            raise asyncio.CancelledError
        if not application.cancelled():
            # asyncio logs exceptions that are not retrieved, and their messages may quote a prompt.
            application.exception()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_preflight(scope: Scope) -> bool:
    """Return whether a request is a CORS preflight.

    A browser sends a preflight to ask whether a page of another origin may send a request.
    """
    names = {name.lower() for name, _ in scope["headers"]}
    return scope["method"] == "OPTIONS" and names >= {b"origin", b"access-control-request-method"}


def tenant_of(scope: Scope) -> str:
    """Return the tenant that the guard has stored in the scope of a request.

    The tenant is the digest of the client's API key, or ``""`` without a key.
    """
    return str(scope.get("pronk.tenant", ""))


def tenant_of_key(key: str) -> str:
    """Return the tenant of the clients with an API key."""
    return _digest(key).hex()


def objects_of(scope: Scope) -> list[Any]:
    """Return the objects that were parsed from a request's body; the list may be appended to.

    The code that parses a body appends its objects, inner ones before outer ones. After the
    response, the guard frees them a part at a time (:meth:`pronk.server.garbage.Bodies.hold`),
    because to free a large body at once would block the event loop.
    """
    objects: list[Any] = scope.setdefault("pronk.objects", [])
    return objects


def _json_headers(
    pairs: Iterable[tuple[bytes, bytes]], headers: Mapping[str, bytes]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers of a request, with ``Content-Type: application/json``.

    Args:
        pairs: name and value of each header.
        headers: the same headers, by name in small letters.

    Raises:
        ApiError: the client has set another media type, or a browser has sent the request without
            ``application/json``: a page of another origin can do that without a preflight.
    """
    media_type = headers.get("content-type", b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        sender = "a browser" if headers.keys() & _BROWSER_HEADERS else "the client"
        if sender == "a browser" or media_type not in _DEFAULT_TYPES:
            found = media_type.decode("latin-1") or "no type"
            msg = (
                f"Content-Type: expected application/json from {sender}, found {found!r:.60}; "
                "set the header"
            )
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, msg, "unsupported_media_type")
    yield from ((name, value) for name, value in pairs if name.lower() != b"content-type")
    yield b"content-type", b"application/json"


def _check_framing(headers: Mapping[str, bytes], http_version: str) -> None:
    """Raise ``ApiError`` if a proxy may see another end of the body than this server.

    Requests with two ends are parts of attacks (request smuggling), and servers may refuse them
    (RFC 9112, section 6.1).
    """
    if "transfer-encoding" not in headers:
        return
    if "content-length" in headers:
        found = "both"
    elif http_version == "1.0":
        found = "the second one with HTTP/1.0"
    else:
        return
    msg = (
        f"headers: expected either Content-Length or Transfer-Encoding, found {found}; send the "
        "first one alone"
    )
    raise ApiError(HTTPStatus.BAD_REQUEST, msg, "invalid_http")


def _key_of(headers: Mapping[str, bytes]) -> bytes | None:
    """Return the API key in ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY`` (Anthropic)."""
    scheme, _, credentials = headers.get("authorization", b"").partition(b" ")
    return credentials.strip() if scheme.lower() == b"bearer" else headers.get("x-api-key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _host(header: bytes) -> str:
    """Return the host in a Host header, without the port: ``[::1]`` of ``[::1]:80``."""
    text = header.decode("latin-1").strip().lower()
    return text[: text.find("]") + 1] if text.startswith("[") else text.partition(":")[0]


def _too_large(limit: int) -> ApiError:
    msg = f"body: expected at most {count_text(limit, 'byte')}, found more; send less"
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, msg, "body_too_large")


def error_response(error: ApiError, path: str = "") -> Response:
    """Return the HTTP response that reports an error of a request for ``path``.

    The path chooses the format of the JSON body: Anthropic's for its API, else OpenAI's.
    """
    return Response(json.dumps(error.body(path)), error.status, error.headers, "application/json")
