"""The server and its replicas as an application of Ray Serve.

::

    serve run pronk.replicas.application:app model=Qwen/Qwen3-0.6B replicas=4 cpus=8 api_key_file=keys.txt

A config file of Ray Serve takes the same options as ``args``. Servers are a deployment apart from the replicas.
"""

from __future__ import annotations

import asyncio
import json
import logging
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
from pronk.server.guard import Guard, Message, Receive, Send
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings, read_keys

__all__ = ["ApplicationArgs", "app"]

_log = logging.getLogger(__name__)

_INFO_TIMEOUT = 60.0  # seconds until a replica must have answered a request for its description


class ApplicationArgs(BaseModel):
    """Options of the application; options of ``pronk serve`` that are not listed have their defaults."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None  # folder that exists on every machine, or Hub id; None is pronk-tiny in a clone of pronk
    replicas: int = 1  # maximum number of replicas
    least: int | None = None  # minimum number of replicas, to which low load reduces them; None means ``replicas``
    servers: int = 1  # number of server processes
    cpus: int = 1  # number of cores per replica
    resources: dict[str, float] = {}  # Ray resources that each replica needs, by name
    name: str | None = None  # name of the model in requests; None is the name of its folder
    api_key_file: str | None = None  # file of API keys, one per line, read when the application is built
    open_to_all: bool = False  # whether ``api_key_file`` may be missing, so that every client is served
    drain: float = 60.0  # seconds that a stopping replica has to finish its requests
    max_requests: int = 256  # maximum number of samples that are generated at the same time
    options: dict[str, Any] = {}  # further options of pronk.LLM: drafter, weights, …


def app(args: ApplicationArgs) -> Any:
    """Build the application for Ray Serve; clients need a key unless ``open_to_all`` is set."""
    if args.api_key_file is None and not args.open_to_all:
        msg = "expected api_key_file=FILE with the keys of clients, found none; add it, or open_to_all=true"
        raise OptionError(msg)
    options = {"prefix_cache": True, "max_batch": 32, "threads": args.cpus, "model": args.model, **args.options}
    limits = RequestLimits(requests=args.max_requests)
    plan = ReplicaPlan(
        options, args.replicas, args.least, (), limits.requests, args.drain, args.cpus, resources=args.resources
    )
    keys = read_keys(Path(args.api_key_file)) if args.api_key_file else ()
    name = args.name or resolve_model(args.model).name
    settings = ServerSettings(name, keys, limits=limits)
    asgi = _Application(settings, args.model, options.get("drafter", "auto"))
    ingress = serve.ingress(asgi)(_Server)
    server = serve.deployment(name="server", num_replicas=args.servers, ray_actor_options={"num_cpus": 0})(ingress)
    return server.bind(model_deployment(plan))


class _Server:
    """Deployment of servers; Ray passes the requests of clients to :class:`_Application`."""

    def __init__(self, model: Any) -> None:
        del model  # the deployment of replicas; Ray starts it because it is an argument of this deployment


class _Application:
    """ASGI application of ``pronk serve``, built at the first request, when the replicas are running."""

    def __init__(self, settings: ServerSettings, model: str | None, drafter: str) -> None:
        self.settings, self.model, self.drafter = settings, model, drafter
        self._guard: Guard | None = None
        self._building: asyncio.Future[Guard] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send)
            return
        try:
            guard = await self._built()
        except (PronkError, RayError, RayServeException, TimeoutError) as error:
            _log.warning("no replica has described itself: %s", repr(error))
            await _refuse(send)
            return
        await guard(scope, receive, send)

    async def _built(self) -> Guard:
        """Return the application, built at the first call; concurrent calls share one attempt to build it."""
        if self._guard is None:
            if self._building is None or self._building.done():
                self._building = asyncio.ensure_future(self._build())
            self._guard = await asyncio.shield(self._building)
        return self._guard

    async def _build(self) -> Guard:
        replicas = deployed(serve.get_replica_context().app_name)
        path = await asyncio.to_thread(resolve_model, self.model)
        about = await asyncio.wait_for(replicas.about_async(), _INFO_TIMEOUT)
        reader = await asyncio.to_thread(ModelReader, path, self.drafter, about)
        dispatcher = Dispatcher(reader, replicas, max_requests=self.settings.limits.requests)
        return Guard(make_app(Service(dispatcher, self.settings)), self.settings)


async def _refuse(send: Send) -> None:
    message = "expected a running replica, found none; try again later"
    error = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, "not_ready")
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error.body()).encode()})


async def _run_lifespan(receive: Receive, send: Send) -> None:
    """Answer the ASGI events startup and shutdown, for which there is nothing to do."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})
