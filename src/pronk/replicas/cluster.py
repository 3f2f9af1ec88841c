"""Replicas on Ray Serve: started on this machine, or on a cluster that is there."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from secrets import token_hex
from socket import create_connection
from time import monotonic, sleep
from typing import Any

import grpc
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig

from pronk.errors import OptionError, PronkError
from pronk.replicas.dispatcher import ReplicaLostError
from pronk.replicas.messages import GenerateRequest, ReplicaInfo, Said
from pronk.replicas.ray_security import is_private
from pronk.replicas.replica import Replica

__all__ = [
    "Deployed",
    "ReplicaPlan",
    "cause_of",
    "check_cores",
    "connect",
    "deploy",
    "deployed",
    "leave",
    "model_deployment",
]

_log = logging.getLogger(__name__)

MODEL = "model"  # by Ray Serve's names
_ROUTER = "pronk.replicas.routing.PrefixRouter"

_KNOCKS = 5.0  # seconds
# Seconds until replicas have loaded their model, and those between two looks; and after a drain, until they are gone.
_LOADING, _LOOK, _GOING = 1200.0, 0.2, 20.0
# Seconds in which cores that somebody has just left are known to be free.
_SETTLING = 10.0

# How often Ray asks a replica whether it is well, and how long it may take to say so, in seconds.
_HEALTH, _ANSWER = 2.0, 10.0
_EXACT = 1e-4  # cores, as Ray counts them
# Requests for each replica at which there are to be more of them, if they last for so many seconds.
_WANTED, _CROWDED = 8.0, 5.0


@dataclass(frozen=True)
class ReplicaPlan:
    """What replicas there are to be.

    Attributes:
        options: of :class:`pronk.LLM`.
        replicas: how many; the most of them, where there are to be fewer at quiet times.
        least: the fewest; ``None``: always ``replicas``.
        also: further drafters that requests may ask for.
        max_requests: most samples of one replica at a time.
        drain: seconds that requests have to end in when a replica goes; then others go on with them.
        cpus: cores of each replica.
        quiet: seconds after which there are fewer, where there may be.
        resources: of Ray's, that each replica takes.
        folder: that paths in the options start from.
    """

    options: Mapping[str, Any]
    replicas: int
    least: int | None = None
    also: Sequence[str] = ()
    max_requests: int = 1024
    drain: float = 60.0
    cpus: float = 1.0
    quiet: float = 60.0
    resources: Mapping[str, float] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)


def connect(address: str | None, cpus: int) -> None:
    """Join the cluster at an address, or begin one of this machine alone.

    Raises:
        OptionError: there is no cluster at the address.
    """
    # What is served here, and how much, is nobody else's business.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "ignore_reinit_error": True}
    if address is None:
        if not is_private():
            _log.warning("the cluster listens to whoever comes; call be_private() before Ray is imported")
        options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    else:
        options |= {"address": address}
    try:
        if address is not None:
            _knock(address)
        ray.init(**options)
    except (OSError, RuntimeError, ValueError) as error:
        msg = f"ray-address: expected a Ray cluster at {address or 'this machine'}, found none: {cause_of(error)}"
        raise OptionError(msg) from error


def _knock(address: str) -> None:
    """Ray waits for minutes for a machine that does not answer.

    Raises:
        OSError: nobody does.
    """
    place = address.rpartition("://")[2]
    host, _, port = place.rpartition(":")
    if not (host and port.isdecimal()):
        return
    create_connection((host.strip("[]"), int(port)), timeout=_KNOCKS).close()
    if "://" in address or os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    channel = grpc.insecure_channel(place, options=[("grpc.enable_http_proxy", 0)])  # as Ray has it
    try:
        grpc.channel_ready_future(channel).result(timeout=_KNOCKS)
    except grpc.FutureTimeoutError as error:
        msg = "who listens there does not speak as Ray does"
        raise OSError(msg) from error
    finally:
        channel.close()


def model_deployment(plan: ReplicaPlan) -> Any:
    """The replicas as Ray Serve deploys them."""
    many: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.least is not None and plan.least < plan.replicas:
        scale = {"min_replicas": plan.least, "max_replicas": plan.replicas, "target_ongoing_requests": _WANTED}
        many = {"autoscaling_config": {**scale, "upscale_delay_s": _CROWDED, "downscale_delay_s": plan.quiet}}
    deployment = serve.deployment(
        name=MODEL,
        max_ongoing_requests=plan.max_requests,
        ray_actor_options={"num_cpus": plan.cpus, "resources": dict(plan.resources)},
        health_check_period_s=_HEALTH,
        health_check_timeout_s=_ANSWER,
        graceful_shutdown_timeout_s=plan.drain,
        graceful_shutdown_wait_loop_s=0.2,
        request_router_config={"request_router_class": _ROUTER},
        logging_config=LoggingConfig(log_level="ERROR", enable_access_log=False),
        **many,
    )(Replica)
    return deployment.bind(dict(plan.options), list(plan.also), plan.folder)


def deployed(app: str) -> Deployed:
    """The replicas of an application, seen from another part of it."""
    return Deployed(serve.get_deployment_handle(MODEL, app))


@contextmanager
def deploy(plan: ReplicaPlan) -> Generator[Deployed]:
    """Start replicas, wait until they serve, and end them in the end, after what they run.

    Raises:
        OptionError: the cluster has too few cores for the fewest of them.
        PronkError: they cannot load the model, or take too long.
    """
    check_cores(plan)
    app = f"pronk-{token_hex(4)}"  # servers share a cluster
    try:
        yield _run(plan, app)
    finally:
        try:
            _delete(app, plan.drain + _GOING)
        except RayServeException:
            pass  # Serve has not begun
        except (RuntimeError, RayError) as error:
            _log.warning("the replicas could not be ended: %s", cause_of(error))


def check_cores(plan: ReplicaPlan) -> None:
    """See whether a cluster has the cores that the fewest of the replicas need.

    Raises:
        OptionError: it has not, or others have them.
    """
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    fewest = plan.least or plan.replicas
    wanted = plan.cpus * fewest
    room = sum((cores + _EXACT) // plan.cpus for cores in nodes) if plan.cpus else fewest
    if wanted > sum(nodes) + _EXACT:
        msg = f"replicas: expected a cluster of at least {wanted:g} cores, found one of {sum(nodes):g}; ask for fewer"
        raise OptionError(msg)
    if room < fewest:
        most = f"{max(nodes):g} at most on one machine"
        msg = f"replicas: expected room for {fewest} of {plan.cpus:g} cores each, found {most}; ask for fewer threads"
        raise OptionError(msg)
    end = monotonic() + _SETTLING
    while wanted - _EXACT > (free := ray.available_resources().get("CPU", 0.0)):  # type: ignore[no-untyped-call]
        if monotonic() > end:
            found = f"{free:g} of {sum(nodes):g}"
            msg = f"replicas: expected {wanted:g} free cores, found {found}; end what has the others, or ask for fewer"
            raise OptionError(msg)
        sleep(_LOOK)


def _delete(app: str, patience: float) -> None:
    serve.delete(app, _blocking=False)
    end = monotonic() + patience
    while app in serve.status().applications:
        if monotonic() > end:
            _log.warning("the replicas have not ended in %.0f seconds; serve.delete(%r) does it", patience, app)
            return
        sleep(_LOOK)


def _run(plan: ReplicaPlan, app: str) -> Deployed:
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config=quiet)
        target = serve.RunTarget(model_deployment(plan), name=app, route_prefix=None, logging_config=quiet)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        _await(app)
        return deployed(app)
    except (RuntimeError, RayError, RayServeException) as error:
        msg = f"replicas: expected {plan.replicas} that load the model, found that they do not: {_why(app, error)}"
        raise PronkError(msg) from error


def _await(app: str) -> None:
    """Until the replicas serve.

    Raises:
        RuntimeError: they do not.
    """
    end = monotonic() + _LOADING
    while (found := serve.status().applications.get(app)) is None or found.status != ApplicationStatus.RUNNING:
        if found is not None and found.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise RuntimeError(found.message)
        if monotonic() > end:
            msg = f"they have not loaded it in {_LOADING:.0f} seconds"
            raise RuntimeError(msg)
        sleep(_LOOK)


def leave() -> None:
    """Leave the cluster, which ends with that if it was begun here."""
    ray.shutdown()


class Deployed:
    """Replicas that Ray Serve has deployed."""

    def __init__(self, handle: Any) -> None:
        """``handle`` is the deployment's, ``ray.serve.handle.DeploymentHandle``."""
        self.handle = handle

    def about(self) -> ReplicaInfo:
        """What a replica is; not from within an event loop."""
        found: ReplicaInfo = self.handle.about.remote().result(timeout_s=60.0)
        return found

    async def tell(self) -> ReplicaInfo:
        """The same from within one."""
        found: ReplicaInfo = await self.handle.about.remote()
        return found

    async def ask(self, ask: GenerateRequest) -> AsyncGenerator[Said]:
        """See :class:`~pronk.replicas.dispatcher.Replicas`."""
        response = self.handle.options(stream=True, method_name="steps").remote(ask)
        try:
            async for said in response:
                yield said
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(cause_of(error)) from error
        finally:
            # Of one that is gone, or that was never chosen, there is nothing to be cancelled.
            with suppress(RayError, RayServeException, RuntimeError):
                response.cancel()


def cause_of(error: BaseException | str) -> str:
    """The line of our own error that Ray quotes last among others, or else what it says first."""
    lines = str(error).strip().splitlines()
    for line in reversed(lines):
        if "pronk.errors." in line:
            return line.partition("pronk.errors.")[2].partition(": ")[2]
    return (lines[0] if lines else type(error).__name__)[:200]


def _why(app: str, error: BaseException) -> str:
    """Why replicas do not serve, as they say, or else as Ray does."""
    application = serve.status().applications.get(app)
    messages = [each.message for each in application.deployments.values()] if application is not None else []
    return cause_of(next((text for text in messages if "pronk.errors." in text), error))
