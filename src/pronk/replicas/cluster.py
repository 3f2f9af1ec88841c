"""Replicas on Ray Serve: started on this machine, or on a cluster that is there."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from secrets import token_hex
from socket import create_connection
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from pronk.errors import OptionError, PronkError
from pronk.replicas.front import LostError
from pronk.replicas.messages import About, Ask, Said
from pronk.replicas.replica import Replica

__all__ = ["Deployed", "Plan", "cause_of", "connect", "deploy", "deployed", "leave", "model_deployment"]

_log = logging.getLogger(__name__)

MODEL = "model"  # by Ray Serve's names
_ROUTER = "pronk.replicas.routing.PrefixRouter"

_KNOCKS = 5.0  # seconds

# How often Ray asks a replica whether it is well, and how long it may take to say so, in seconds.
_HEALTH, _ANSWER = 2.0, 10.0
# Requests for each replica at which there are to be more of them.
_WANTED = 8.0


@dataclass(frozen=True)
class Plan:
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
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        create_connection((host.strip("[]"), int(port)), timeout=_KNOCKS).close()


def model_deployment(plan: Plan) -> Any:
    """The replicas as Ray Serve deploys them."""
    many: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.least is not None and plan.least < plan.replicas:
        scale = {"min_replicas": plan.least, "max_replicas": plan.replicas, "target_ongoing_requests": _WANTED}
        many = {"autoscaling_config": {**scale, "downscale_delay_s": plan.quiet}}
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
    return deployment.bind(dict(plan.options), list(plan.also), plan.max_requests, plan.folder)


def deployed(app: str) -> Deployed:
    """The replicas of an application, seen from another part of it."""
    return Deployed(serve.get_deployment_handle(MODEL, app))


@contextmanager
def deploy(plan: Plan) -> Generator[Deployed]:
    """Start replicas, wait until they serve, and end them in the end, after what they run.

    Raises:
        OptionError: the cluster has too few cores for the fewest of them.
        PronkError: they cannot load the model.
    """
    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cores, wanted = there.get("CPU", 0.0), plan.cpus * (plan.least or plan.replicas)
    if wanted > cores:
        msg = f"replicas: expected a cluster of at least {wanted:g} cores, found one of {cores:g}; ask for fewer"
        raise OptionError(msg)
    app = f"pronk-{token_hex(4)}"  # servers share a cluster
    try:
        yield _run(plan, app)
    finally:
        try:
            serve.delete(app)
        except RayServeException:
            pass  # Serve has not begun
        except (RuntimeError, RayError) as error:
            _log.warning("the replicas could not be ended: %s", cause_of(error))


def _run(plan: Plan, app: str) -> Deployed:
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config=quiet)
        return Deployed(serve.run(model_deployment(plan), name=app, route_prefix=None))
    except (RuntimeError, RayError, RayServeException) as error:
        msg = f"replicas: expected {plan.replicas} that load the model, found that they do not: {_why(app, error)}"
        raise PronkError(msg) from error


def leave() -> None:
    """Leave the cluster, which ends with that if it was begun here."""
    ray.shutdown()


class Deployed:
    """Replicas that Ray Serve has deployed."""

    def __init__(self, handle: Any) -> None:
        """``handle`` is the deployment's, ``ray.serve.handle.DeploymentHandle``."""
        self.handle = handle

    def about(self) -> About:
        """What a replica is; not from within an event loop."""
        found: About = self.handle.about.remote().result(timeout_s=60.0)
        return found

    async def tell(self) -> About:
        """The same from within one."""
        found: About = await self.handle.about.remote()
        return found

    async def ask(self, ask: Ask) -> AsyncGenerator[Said]:
        """See :class:`~pronk.replicas.front.Replicas`."""
        response = self.handle.options(stream=True, method_name="steps").remote(ask)
        try:
            async for said in response:
                yield said
        except (RayError, RayServeException) as error:
            raise LostError(cause_of(error)) from error
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
