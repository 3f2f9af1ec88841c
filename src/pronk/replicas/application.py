"""The server and its replicas as one application of Ray Serve, for a cluster.

::

    serve run pronk.replicas.application:app model=Qwen/Qwen3-0.6B replicas=4 cpus=8 api_key_file=keys.txt

``args`` of a Serve config file are the same. The server is a deployment of its own, which may be scaled as well.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from pronk.errors import OptionError, PronkError
from pronk.models.loader import resolve_model
from pronk.replicas.cluster import ReplicaPlan, deployed, model_deployment
from pronk.replicas.dispatcher import Dispatcher, ModelReader
from pronk.server.app import make_app
from pronk.server.errors import ApiError
from pronk.server.guard import Guard
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings, read_keys

__all__ = ["ApplicationArgs", "app"]

Message = MutableMapping[str, Any]

_log = logging.getLogger(__name__)

_ANSWER = 60.0  # seconds in which a replica says what it is


class ApplicationArgs(BaseModel):
    """Of the application; what is not here has the defaults of ``pronk serve``.

    Attributes:
        model: a folder that every machine has, or an id of the Hub; ``None`` is the clone's ``pronk-tiny``.
        replicas, least: the most of them, and the fewest.
        servers: of the deployments that clients talk to.
        cpus: cores of each replica.
        resources: of Ray's, that each replica takes.
        name: what clients call the model.
        api_key_file: keys, one a line; read once, where the application is built.
        open_to_all: whoever reaches Ray's proxy may ask, without a key.
        drain: seconds that requests have to end in.
        max_requests: most samples at a time.
        options: further ones of :class:`pronk.LLM`: ``drafter``, ``weights``, …
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    replicas: int = 1
    least: int | None = None
    servers: int = 1
    cpus: int = 1
    resources: dict[str, float] = {}
    name: str | None = None
    api_key_file: str | None = None
    open_to_all: bool = False
    drain: float = 60.0
    max_requests: int = 256
    options: dict[str, Any] = {}


def app(args: ApplicationArgs) -> Any:
    """The application, as Ray Serve builds it.

    Raises:
        OptionError: no keys are given, and it is not said that none are wanted.
    """
    if args.api_key_file is None and not args.open_to_all:
        msg = "expected api_key_file=… for who may ask, found none; or say open_to_all=true"
        raise OptionError(msg)
    options = {"prefix_cache": True, "max_batch": 32, "threads": args.cpus, "model": args.model, **args.options}
    limits = RequestLimits(requests=args.max_requests)
    many = (args.replicas, args.least)
    plan = ReplicaPlan(options, *many, (), limits.requests, args.drain, args.cpus, resources=args.resources)
    keys = read_keys(Path(args.api_key_file)) if args.api_key_file else ()
    name = args.name or resolve_model(args.model).name
    settings = ServerSettings(name, keys, limits=limits)
    asked = _Application(settings, args.model, options.get("drafter", "auto"))
    server = serve.deployment(name="server", num_replicas=args.servers, ray_actor_options={"num_cpus": 0})(
        serve.ingress(asked)(_Server)
    )
    return server.bind(model_deployment(plan))


class _Server:
    """What clients talk to; all it does is in the application."""

    def __init__(self, model: Any) -> None:
        del model  # so that Ray deploys it as well


class _Application:
    """The same as ``pronk serve`` has, made when the first request comes: only then are the replicas there."""

    def __init__(self, settings: ServerSettings, model: str | None, drafter: str) -> None:
        self.settings, self.model, self.drafter = settings, model, drafter
        self._guard: Guard | None = None
        self._making: asyncio.Future[Guard] | None = None

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """One connection, as ASGI has it."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        try:
            made = await self._made()
        except (PronkError, RayError, RayServeException, TimeoutError) as error:
            _log.warning("no replica has said what it is: %s", repr(error))
            await _refuse(send)
            return
        await made(scope, receive, send)

    async def _made(self) -> Guard:
        """Made once; all who come meanwhile wait for the same, and the next ones try again."""
        if self._guard is None:
            if self._making is None or self._making.done():
                self._making = asyncio.ensure_future(self._make())
            self._guard = await asyncio.shield(self._making)
        return self._guard

    async def _make(self) -> Guard:
        replicas = deployed(serve.get_replica_context().app_name)
        path = await asyncio.to_thread(resolve_model, self.model)
        about = await asyncio.wait_for(replicas.tell(), _ANSWER)
        reader = await asyncio.to_thread(ModelReader, path, self.drafter, about)
        front = Dispatcher(reader, replicas, max_requests=self.settings.limits.requests)
        return Guard(make_app(Service(front, self.settings)), self.settings)


async def _refuse(send: Callable[[Message], Awaitable[None]]) -> None:
    error = ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE, "expected replicas that answer, found none; try again", "not_ready"
    )
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error.body()).encode()})


async def _live(receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
    """Nothing is begun before a request comes, and nothing has to be ended."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})
