r"""The servers and replicas of a model as an application of Ray Serve.

::

    serve run pronk.server.replicas.application:app \
        model=Qwen/Qwen3-0.6B replicas=4 cpus=8 api_key_file=keys.txt

In a config file of Ray Serve, the same options are the entries of ``args``. The application has two
deployments: the servers, which receive the requests of clients, and the replicas, which generate
the answers.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pronk import OptionError, PronkError
from pronk.checkpoint import model_label, resolve_model
from pronk.server.app import make_app
from pronk.server.errors import ApiError
from pronk.server.guard import Guard, error_response
from pronk.server.model_pool import ModelPool
from pronk.server.replicas.cluster import RayReplicas, ReplicaPlan, model_deployment
from pronk.server.replicas.dispatcher import Dispatcher, ModelReader, ReplicaLostError
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings, read_keys

_log = logging.getLogger(__name__)

_NO_REPLICA = "expected a running replica, found none; try again later"
_READY_TIMEOUT = 2.0  # seconds until /ready reports that no replica has described itself yet
_INFO_TIMEOUT = 60.0  # seconds to wait for the description of a replica (model, options)


class ApplicationArgs(BaseModel):
    """Options of the application; other options of ``pronk serve`` have their default values."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    # Folder that exists on every machine, or Hub id. None means the default model, smollm2.
    model: str | None = None
    replicas: int = 1  # maximum number of replicas
    # Number of replicas at low load; None means ``replicas``.
    least: int | None = None
    servers: int = 1  # number of server processes
    cpus: int = 1  # number of cores per replica
    resources: dict[str, float] = {}  # amount of each Ray resource that a replica needs, by name
    # Name of the model in requests; None means the name of the model's folder.
    name: str | None = None
    # File of API keys, one per line, read when the application is built.
    api_key_file: str | None = None
    # Whether ``api_key_file`` may be missing, so that every client is served.
    open_to_all: bool = False
    drain: float = 60.0  # seconds for a stopping replica to finish its requests
    # Maximum number of samples in progress per server, and of requests per replica.
    max_requests: int = 256
    options: dict[str, Any] = {}  # further options of pronk.LLM: drafter, weights, …


def app(args: ApplicationArgs) -> Any:
    """Build the application for Ray Serve; clients need a key unless ``open_to_all`` is set.

    Raises:
        OptionError: ``args`` has neither ``api_key_file`` nor ``open_to_all``.
    """
    if args.api_key_file is None and not args.open_to_all:
        msg = (
            "expected api_key_file=FILE with the keys of clients, found none; add it, or "
            "open_to_all=true"
        )
        raise OptionError(msg)
    options = {
        "prefix_cache": True,
        "max_batch": 32,
        "threads": args.cpus,
        "model": args.model,
        **args.options,
    }
    limits = RequestLimits(requests=args.max_requests)
    plan = ReplicaPlan(
        options,
        replicas=args.replicas,
        min_replicas=args.least,
        max_requests=limits.requests,
        drain=args.drain,
        cpus=args.cpus,
        resources=args.resources,
    )
    keys = read_keys(Path(args.api_key_file)) if args.api_key_file else ()
    name = args.name or model_label(resolve_model(args.model))
    settings = ServerSettings(name, keys, limits=limits)
    asgi_app = _AsgiApplication(settings, args.model, options.get("drafter", "auto"))
    ingress = serve.ingress(asgi_app)(_Server)
    server = serve.deployment(
        name="server", num_replicas=args.servers, ray_actor_options={"num_cpus": 0}
    )(ingress)
    return server.bind(model_deployment(plan))


class _Server:
    """Ray Serve deployment of the server processes; ``_AsgiApplication`` answers their requests."""

    def __init__(self, model: Any) -> None:
        del model  # Ray starts the replicas' deployment because it is an argument here


class _AsgiApplication:
    """ASGI application of ``pronk serve``, built at the first request, when the replicas run."""

    def __init__(self, settings: ServerSettings, model: str | None, drafter: str) -> None:
        self.settings = settings
        self.model = model
        self.drafter = drafter
        self._guard: ASGIApp | None = None
        self._building: asyncio.Future[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as ``pronk serve`` does, or with status 503 if no replica answers."""
        if scope["type"] == "lifespan":  # ASGI requires a confirmation of both events
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        if scope["path"] == "/health":  # the process runs, also without a replica
            await Response('{"status": "ok"}', media_type="application/json")(scope, receive, send)
            return
        try:
            # /ready is answered in time; the application is built further in the meantime.
            wait = _READY_TIMEOUT if scope["path"] == "/ready" else None
            guard = await asyncio.wait_for(self._get_guard(), wait)
        except (PronkError, ReplicaLostError, RayError, RayServeException, TimeoutError) as error:
            _log.warning("no replica has described itself: %s", repr(error))
            refusal = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, _NO_REPLICA, "not_ready")
            await error_response(refusal)(scope, receive, send)
            return
        await guard(scope, receive, send)

    async def _get_guard(self) -> ASGIApp:
        """Return the ASGI application of ``pronk serve``; concurrent calls build only one."""
        if self._guard is None:
            if self._building is None or self._building.done():
                self._building = asyncio.ensure_future(self._build())
            self._guard = await asyncio.shield(self._building)
        return self._guard

    async def _build(self) -> ASGIApp:
        replicas = RayReplicas(serve.get_replica_context().app_name)
        path = await asyncio.to_thread(resolve_model, self.model)
        description = await asyncio.wait_for(replicas.about_async(), _INFO_TIMEOUT)
        reader = await asyncio.to_thread(ModelReader, path, self.drafter, description)
        settings = self.settings
        limit = settings.limits.requests
        dispatcher = Dispatcher(reader, replicas, max_requests=limit, shared=settings.is_shared)
        models = ModelPool.of(Service(dispatcher, settings))
        return Guard(make_app(models), settings)
