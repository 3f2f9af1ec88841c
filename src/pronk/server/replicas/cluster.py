"""Replicas of a model on Ray Serve, in a local or an existing Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pronk import OptionError, PronkError
from pronk.server.replicas import is_private
from pronk.server.replicas.dispatcher import ReplicaLostError
from pronk.server.replicas.messages import GenerateRequest, ReplicaInfo, ReplicaMessage
from pronk.server.replicas.replica import NAMESPACE, Replica, ServerProcess

_log = logging.getLogger(__name__)

MODEL = "model"  # Ray Serve's name of the deployment whose replicas run the model
_ROUTER = "pronk.server.replicas.routing.PrefixRouter"
_QUIET = LoggingConfig(log_level="ERROR", enable_access_log=False)

# All timeouts, periods, intervals and delays are in seconds. The first one is the time limit to
# connect to a Ray cluster.
_CONNECT_TIMEOUT = 5.0
_LOAD_TIMEOUT = 1200.0  # time limit for all replicas to load the model
# Time limit for all replicas to stop, after the seconds of ``ReplicaPlan.drain``.
_STOP_TIMEOUT = 20.0
_POLL_INTERVAL = 0.2
# Time in which Ray must report the cores of stopped processes as free, which takes some seconds.
_FREE_CORES_TIMEOUT = 10.0
# Period and time limit of Ray's calls of ``Replica.check_health``.
_HEALTH_PERIOD = 2.0
_HEALTH_TIMEOUT = 10.0
# Time with more than ``_TARGET_REQUESTS`` per replica, after which Ray Serve adds replicas.
_UPSCALE_DELAY = 5.0

# Number of concurrent requests per replica that Ray Serve aims at by adding and removing replicas.
_TARGET_REQUESTS = 8.0
_CORE_TOLERANCE = 1e-4  # Ray rounds numbers of cores to multiples of this


@dataclass(frozen=True)
class ReplicaPlan:
    """Number, resources and options of the replicas."""

    options: Mapping[str, Any]  # arguments of pronk.LLM
    replicas: int  # maximum number of replicas
    min_replicas: int | None = None  # number of replicas at low load; None means no autoscaling
    # Drafters that requests may choose, besides the default in ``options``.
    extra_drafters: Sequence[str] = ()
    max_requests: int = 1024  # maximum number of concurrent requests per replica
    # Seconds for a stopping replica to finish its requests; other replicas resume unfinished ones.
    drain: float = 60.0
    cpus: float = 1.0  # number of cores per replica
    # Seconds with fewer than ``_TARGET_REQUESTS`` per replica until a replica is removed.
    downscale_delay: float = 60.0
    # Amount of each Ray resource that a replica needs, by the name of the resource.
    resources: Mapping[str, float] = field(default_factory=dict)
    # Working directory of the replicas, for relative paths.
    folder: str = field(default_factory=os.getcwd)
    # Name of the Ray Serve application of the replicas. They delete the application when the
    # server's process has ended; with None, they go on running.
    app: str | None = None


def connect(address: str | None, cpus: int) -> None:
    """Connect to the Ray cluster at ``address``; for ``None``, start one with ``cpus`` cores.

    Raises:
        OptionError: there is no cluster at the address, or none can be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "ignore_reinit_error": True,
    }
    if address is None:
        if not is_private():
            _log.warning(
                "the cluster accepts any client of the network; "
                "call be_private() before Ray is imported"
            )
        options |= {"num_cpus": cpus, "include_dashboard": False}
    try:
        if address is not None:
            _check_reachable(address)
        ray.init("local" if address is None else address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        place = address or "this machine"
        msg = f"ray-address: expected a Ray cluster at {place}, found none: {cause_of(error)}"
        raise OptionError(msg) from error


def _check_reachable(address: str) -> None:
    """Raise ``OSError`` unless Ray answers at ``host:port`` in ``_CONNECT_TIMEOUT`` seconds.

    ``ray.init`` itself would wait for minutes.
    """
    target = address.rpartition("://")[2]
    host, _, port = target.rpartition(":")
    if not (host and port.isdecimal()):
        return
    create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT).close()
    if "://" in address or os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    # Ray itself connects without a proxy, too.
    channel = grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)])
    try:
        grpc.channel_ready_future(channel).result(timeout=_CONNECT_TIMEOUT)
    except grpc.FutureTimeoutError as error:
        msg = "the service at this port is not Ray"
        raise OSError(msg) from error
    finally:
        channel.close()


def model_deployment(plan: ReplicaPlan) -> Any:
    """Return a Ray Serve deployment, bound to its arguments but not started, that runs ``plan``."""
    num_replicas: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.min_replicas is not None and plan.min_replicas < plan.replicas:
        autoscaling = {
            "min_replicas": plan.min_replicas,
            "max_replicas": plan.replicas,
            "upscale_delay_s": _UPSCALE_DELAY,
            "downscale_delay_s": plan.downscale_delay,
            "target_ongoing_requests": _TARGET_REQUESTS,
        }
        num_replicas = {"autoscaling_config": autoscaling}
    deployment = serve.deployment(
        name=MODEL,
        max_ongoing_requests=plan.max_requests,
        ray_actor_options={"num_cpus": plan.cpus, "resources": dict(plan.resources)},
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=plan.drain,
        graceful_shutdown_wait_loop_s=0.2,
        request_router_config={"request_router_class": _ROUTER},
        logging_config=_QUIET,
        **num_replicas,
    )(Replica)
    return deployment.bind(dict(plan.options), list(plan.extra_drafters), plan.folder, plan.app)


@contextmanager
def deploy(plan: ReplicaPlan) -> Generator[RayReplicas]:
    """Start replicas, and wait until all of them serve.

    At the end of the ``with`` block, the replicas finish their requests and stop.

    Raises:
        OptionError: the cluster has too few cores for the minimum number of replicas.
        PronkError: a replica cannot load the model, or takes too long.
    """
    check_cores(plan)
    app = f"pronk-{token_hex(4)}"  # a random name, because several servers may share a cluster
    # Ray keeps an application when the process that started it dies, but ends this actor. The
    # replicas look for the actor, and stop without it. The actor runs on the server's own node, so
    # that the loss of another node does not end it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    process = ray.remote(num_cpus=0, max_restarts=-1)(ServerProcess).options(
        name=app, namespace=NAMESPACE, scheduling_strategy=here
    )
    owner = process.remote()
    try:
        yield _start(replace(plan, app=app), app)
    finally:
        try:
            _delete(app, plan.drain + _STOP_TIMEOUT)
        except RayServeException:
            pass  # Ray Serve does not run, so that there are no replicas to stop
        except (RuntimeError, RayError) as error:
            _log.warning("could not stop the replicas: %s", cause_of(error))
        del owner


def check_cores(plan: ReplicaPlan) -> None:
    """Raise ``OptionError`` unless the cluster has free cores for the minimum number of replicas.

    A replica needs all its cores on one machine.
    """
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    cores = [node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]]
    count = plan.min_replicas or plan.replicas
    needed = plan.cpus * count
    if needed > sum(cores) + _CORE_TOLERANCE:
        msg = (
            f"replicas: expected at least {needed:g} cores in the cluster, found {sum(cores):g}; "
            "use fewer replicas"
        )
        raise OptionError(msg)
    if plan.cpus and count > sum((size + _CORE_TOLERANCE) // plan.cpus for size in cores):
        machines = f"machines of at most {max(cores):g} cores"
        msg = (
            f"replicas: expected room for {count} of {plan.cpus:g} cores each, found {machines}; "
            "use fewer threads"
        )
        raise OptionError(msg)
    end = monotonic() + _FREE_CORES_TIMEOUT
    while True:
        free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
        if needed <= free + _CORE_TOLERANCE:
            return
        if monotonic() > end:
            found = f"{free:g} of {sum(cores):g}"
            msg = (
                f"replicas: expected {needed:g} free cores, found {found}; use fewer replicas, or "
                "stop other programs"
            )
            raise OptionError(msg)
        sleep(_POLL_INTERVAL)


def _delete(app: str, timeout: float) -> None:
    serve.delete(app, _blocking=False)
    end = monotonic() + timeout
    while app in serve.status().applications:
        if monotonic() > end:
            _log.warning(
                "the replicas did not stop in %.0f seconds; call ray.serve.delete(%r)", timeout, app
            )
            return
        sleep(_POLL_INTERVAL)


def _start(plan: ReplicaPlan, app: str) -> RayReplicas:
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config=_QUIET)
        deployment = model_deployment(plan)
        target = serve.RunTarget(deployment, name=app, route_prefix=None, logging_config=_QUIET)
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _wait_until_running(app)
        return RayReplicas(app)
    except (RuntimeError, RayError, RayServeException) as error:
        msg = (
            f"replicas: expected {plan.replicas} with the model loaded, found an error: "
            f"{_app_error(app, error)}"
        )
        raise PronkError(msg) from error


def _wait_until_running(app: str) -> None:
    """Wait until all replicas of an application serve.

    Raises:
        RuntimeError: a replica failed, or the replicas take more than ``_LOAD_TIMEOUT`` seconds.
    """
    failures = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
    end = monotonic() + _LOAD_TIMEOUT
    while True:
        state = serve.status().applications.get(app)
        if state is not None and state.status == ApplicationStatus.RUNNING:
            return
        if state is not None and state.status in failures:
            raise RuntimeError(state.message)
        if monotonic() > end:
            msg = f"the model was not loaded in {_LOAD_TIMEOUT:.0f} seconds"
            raise RuntimeError(msg)
        sleep(_POLL_INTERVAL)


class RayReplicas:
    """Client of the running replicas of the Ray Serve application ``app``."""

    def __init__(self, app: str) -> None:
        # Ray's types lack the methods of streaming responses.
        self.handle: Any = serve.get_deployment_handle(MODEL, app)

    def about(self) -> ReplicaInfo:
        """Return the description of any replica.

        The call blocks, so that it must not be made in an event loop.
        """
        return self.handle.about.remote().result(timeout_s=60.0)

    async def about_async(self) -> ReplicaInfo:
        """Return the description of any replica.

        Raises:
            ReplicaLostError: the replica has died.
        """
        try:
            return await self.handle.about.remote()
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(cause_of(error)) from error

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaMessage]:
        """Run a request on one replica, and yield the messages of the replica.

        Raises:
            ReplicaLostError: the replica has died.
        """
        response = self.handle.options(stream=True, method_name="steps").remote(request)
        try:
            async for message in response:
                yield message
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(cause_of(error)) from error
        finally:
            # cancel() raises if the replica is dead, or if Ray has selected none yet.
            with suppress(RayError, RayServeException, RuntimeError):
                response.cancel()


def cause_of(error: BaseException | str) -> str:
    """Return the message of pronk's last exception in an error of Ray.

    If the error quotes no exception of pronk, return its first line, cut at 200 characters.
    """
    lines = str(error).strip().splitlines()
    for line in reversed(lines):
        if "pronk.base.errors." in line:
            return line.partition("pronk.base.errors.")[2].partition(": ")[2]
    return (lines[0] if lines else type(error).__name__)[:200]


def _app_error(app: str, error: BaseException) -> str:
    """Return why the Ray Serve application ``app`` does not run, as one line.

    The line is the message of pronk's exception in a replica, if Ray reports one, otherwise that of
    ``error``.
    """
    application = serve.status().applications.get(app)
    if application is not None:
        for status in application.deployments.values():
            if "pronk.base.errors." in status.message:
                return cause_of(status.message)
    return cause_of(error)
