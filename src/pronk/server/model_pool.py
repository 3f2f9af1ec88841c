"""Models of one server, loaded on demand, and unloaded when idle or when memory is short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from math import ceil
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Literal

from pronk import DeadlineError, PronkError
from pronk.base import FairExecutor, describe_error
from pronk.server.errors import ApiError, unknown_model
from pronk.server.metrics import Metrics
from pronk.server.model_loader import MemoryEstimate, ModelLoader
from pronk.server.names import AdapterNames
from pronk.server.protocol.request import TextRequest
from pronk.server.service import Service
from pronk.server.settings import ServerSettings
from pronk.serving import REQUEST_THREADS, AdmissionLimit, recommended_params, sampling_values

if TYPE_CHECKING:
    from pronk.server.pulls import Pulls

_log = logging.getLogger(__name__)
# Number of seconds after a failed load. Requests for the model get the error of the load at once
# during this time; later requests load the model again.
_RETRY_SECONDS = 30.0


@dataclass(eq=False)
class PooledModel:
    """A model of a :class:`ModelPool`, and its state; changed by the event loop only."""

    names: AdapterNames  # names of the model and its adapters
    # ``None`` if the model was loaded before the pool was made; it is then never unloaded.
    loader: ModelLoader | None
    pinned: bool = False  # whether the model is never unloaded
    state: Literal["unloaded", "loading", "loaded", "failed"] = "unloaded"
    service: Service | None = None  # ``None`` unless the state is ``loaded``
    num_running: int = 0  # number of requests that use ``service``
    num_waiting: int = 0  # number of requests that wait for ``service``
    # Whether new requests for the model wait, because it will be unloaded: another model needs its
    # memory.
    retiring: bool = False
    last_use: float = 0.0  # time of the end of the last request, or of the load (``monotonic``)
    num_bytes: int = 0  # estimated memory, from the start of the load to the end of the unloading
    error: ApiError | None = None  # reason of the state ``failed``
    retry_at: float = 0.0  # time after which a failed load is tried again (``monotonic``)
    # Fields of the model's entry in the reply to ``/v1/models`` that are unknown before the first
    # load, such as ``max_model_len``.
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the model itself."""
        return self.names.model

    def describe(self) -> list[dict[str, Any]]:
        """Return the entries of the model and its adapters in the reply to ``/v1/models``."""
        common = {
            "object": "model",
            "created": 0,
            "owned_by": "pronk",
            "state": self.state,
            **self.details,
        }
        if self.error is not None:
            common["error"] = self.error.message
        entries = list[dict[str, Any]]()
        for name in self.names.all:
            parent = None if name == self.name else self.name
            entries.append({"id": name, "parent": parent, **common})
        return entries


class ModelPool:
    """The models of one server.

    Requests for a model that is not loaded wait until the model is loaded. One model loads at a
    time, in a thread, while the others go on. Each tenant (API key) has a share of the places to
    wait. Models are loaded for one tenant after another, and for the same tenant in the order in
    which its requests arrived.

    If memory is short, idle models are unloaded first, the least recently used one before others.
    If all models are busy, new requests for the least recently used one wait until its running
    requests have ended; then the model is unloaded. This also keeps a stream of requests for one
    model from blocking the others.

    Attributes:
        models: all models; the first one answers requests that name no model.
        settings: settings that the models share.
        metrics: metrics of the first model; their registry has those of all models.
        executor: threads that read requests and write replies, shared by all models.
        draining: whether the server is shutting down and refuses new requests.
        pulls: downloads that clients ask for; ``None`` refuses them.
    """

    def __init__(
        self,
        models: Sequence[PooledModel],
        settings: ServerSettings,
        *,
        memory: int | None = None,
        idle_seconds: float | None = None,
        metrics: Metrics | None = None,
        executor: FairExecutor | None = None,
    ) -> None:
        """Make a pool of models with distinct names.

        ``memory`` is a limit in bytes for all loaded models. A model is unloaded after
        ``idle_seconds`` without a request. ``metrics`` and ``executor`` are those of the first
        model, if it was loaded elsewhere.
        """
        self.models = [*models]
        self.settings = settings
        self.memory = memory
        self.metrics = metrics or Metrics(models[0].name)
        self.executor = executor or FairExecutor(
            REQUEST_THREADS, "pronk-requests", shared=settings.is_shared
        )
        self.draining = False
        self.pulls: Pulls | None = None
        # Models load in this executor, because the end of the process does not wait for its jobs.
        self._loading = FairExecutor(1, "pronk-models")
        self._metrics = {models[0]: self.metrics}
        for model in models[1:]:
            self._metrics[model] = self.metrics.for_model(model.name)
        self.idle_seconds = idle_seconds
        # Limit of the number of requests that wait for a model to be loaded; each tenant has a
        # share.
        self._waiting = AdmissionLimit(settings.limits.requests, shared=settings.is_shared)
        # Models to load, by the tenants whose requests wait for them. The first model of the first
        # tenant loads now. Afterwards the first tenant goes behind the others.
        self._queue: dict[str, list[PooledModel]] = {}
        self._lock = asyncio.Lock()  # held while a model is loaded or unloaded
        # Wakes tasks that wait for a change of a model's state or number of requests. At each
        # change, the event is set and replaced by a new one.
        self._changed = asyncio.Event()
        self._tasks = dict[str, asyncio.Task[None]]()

    @classmethod
    def of(cls, service: Service) -> ModelPool:
        """Return the pool of a single loaded model."""
        model = PooledModel(service.names, None, pinned=True)
        pool = cls(
            [model], service.settings, metrics=service.metrics, executor=service.engine.executor
        )
        pool._set_loaded(pool.models[0], service)
        return pool

    @property
    def num_requests(self) -> int:
        """Number of requests that use a model or wait for one."""
        return sum(model.num_running + model.num_waiting for model in self.models)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for a model or runs on one."""
        if self.num_requests > 0:
            return True
        services = [model.service for model in self.models]
        return any(service is not None and service.is_busy for service in services)

    def add(self, model: PooledModel) -> None:
        """Add a model that is not loaded, with names that no other model has."""
        self._metrics[model] = self.metrics.for_model(model.name)
        self.models.append(model)

    def check_running(self) -> None:
        """Raise ``ApiError`` if the server is shutting down."""
        if self.draining:
            msg = (
                "expected a running server, found one that is shutting down; send the request to "
                "another server"
            )
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, msg, "draining", headers={"Retry-After": "5"}
            )

    def find(self, name: str | None) -> PooledModel:
        """Return the model with a name, or with an adapter of this name.

        ``None`` finds the first model.

        Raises:
            ApiError: there is no such model.
        """
        for model in self.models:
            if name is None or name in model.names:
                return model
        names = [each for model in self.models for each in model.names.all]
        raise unknown_model(str(name), *names)

    async def is_ready(self) -> bool:
        """Return whether requests are accepted, and a model can answer or be loaded."""
        if self.draining:
            return False
        for model in self.models:
            if model.service is not None and await model.service.engine.is_ready():
                return True
            failed = model.state == "failed" and monotonic() < model.retry_at
            if not failed and (model.service is None or self._reloads):  # a request would load it
                return True
        return False

    async def stream(
        self, request: TextRequest, tenant: str = ""
    ) -> AsyncGenerator[list[dict[str, Any]]]:
        """Load the request's model if necessary; yield the chunks of the reply as JSON values.

        There is one list of chunks per step of the engine, see :meth:`Service.stream`.
        """
        async with (
            self.use(request.model, tenant) as (service, arrived),
            aclosing(service.stream(request, tenant, arrived=arrived)) as steps,
        ):
            async for chunks in steps:
                yield chunks

    @asynccontextmanager
    async def use(
        self, name: str | None, tenant: str = ""
    ) -> AsyncGenerator[tuple[Service, float]]:
        """Load a model for a request, if necessary, and keep it loaded within the block.

        Yields the model's service, and the time of the request's arrival (``perf_counter``).

        Raises:
            ApiError: the server is shutting down, there is no such model, or it cannot be loaded.
            DeadlineError: the model was not loaded by the deadline of the request.
            OverloadedError: too many requests wait, of all tenants or of this one.
        """
        self.check_running()
        model = self.find(name)
        with self._metrics[model].request() as arrived:
            service = await self._service_of(model, tenant, arrived + self.settings.limits.seconds)
        model.num_running += 1
        try:
            yield service, arrived
        finally:
            model.num_running -= 1
            model.last_use = monotonic()
            self._notify()

    def preload(
        self, model: PooledModel, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Load a model before the server starts.

        Raises:
            CheckpointError: the model cannot be loaded.
            OptionError: the model does not fit into the memory beside the loaded models.
        """
        assert model.loader is not None, "expected a model that is not loaded, found a loaded one"
        if self.memory is not None:
            estimate = model.loader.estimate()
            taken = sum(each.num_bytes for each in self.models)
            estimate.check_fits(model.name, self.memory, taken, "loaded")
            model.num_bytes = estimate.total
        service = model.loader.load(self._metrics[model], progress, executor=self.executor)
        self._set_loaded(model, service)

    def start(self) -> None:
        """Start the task that unloads idle models; called in the event loop."""
        if self.idle_seconds is not None:
            self._tasks["idle"] = asyncio.ensure_future(self._unload_idle(self.idle_seconds))

    def stop(self) -> None:
        """Stop loading models; stop engines after their step, and threads after their job."""
        for task in self._tasks.values():
            task.cancel()
        self.executor.shutdown()
        self._loading.shutdown()
        if self.pulls is not None:
            self.pulls.shutdown()
        for model in self.models:
            if model.service is not None:
                model.service.close()

    async def close(self) -> None:
        """Call :meth:`stop`, and wait for the ends of tasks and engines."""
        self.stop()
        for task in self._tasks.values():
            with suppress(asyncio.CancelledError):
                await task
        for model in self.models:
            if model.service is not None:
                await model.service.engine.close()

    def finish(self) -> None:
        """Save the drafters' statistics of the loaded models, and close the models.

        Called after the end of the event loop.
        """
        for model in self.models:
            if model.service is not None and model.loader is not None:
                model.loader.finish(model.service)

    @property
    def _reloads(self) -> bool:
        """Whether a model is loaded again after its engine has ended.

        A single model is not; ``/ready`` reports it to the supervisor.
        """
        return len(self.models) > 1 or self.idle_seconds is not None

    def _is_usable(self, model: PooledModel) -> bool:
        if model.service is None or model.retiring:
            return False
        return model.service.engine.alive or not self._reloads

    async def _service_of(self, model: PooledModel, tenant: str, ends_at: float) -> Service:
        """Wait until a model is loaded, and return its service; raise the errors of :meth:`use`."""
        if not self._is_usable(model):
            with self._waiting.hold(1, tenant):
                await self._wait_until_loaded(model, tenant, ends_at)
        assert model.service is not None, "expected a loaded model, found none"
        return model.service

    async def _wait_until_loaded(self, model: PooledModel, tenant: str, ends_at: float) -> None:
        model.num_waiting += 1
        try:
            async with asyncio.timeout(max(0.0, ends_at - perf_counter())):
                while not self._is_usable(model):
                    if model.error is not None and monotonic() < model.retry_at:
                        seconds = max(1, ceil(model.retry_at - monotonic()))
                        status = model.error.status
                        text = model.error.message
                        code = model.error.code
                        raise ApiError(status, text, code, "model", {"Retry-After": str(seconds)})
                    self._queue_load(model, tenant)
                    await self._changed.wait()
        except TimeoutError as error:
            msg = (
                f"the model {model.name} was not loaded by the deadline of the request; "
                "try again later"
            )
            raise DeadlineError(msg) from error
        finally:
            model.num_waiting -= 1
            if not model.num_waiting:
                self._notify()  # the loader may wait for memory that this model no longer needs

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _queue_load(self, model: PooledModel, tenant: str) -> None:
        models = self._queue.setdefault(tenant, [])
        if model not in models:
            models.append(model)
        if "load" not in self._tasks or self._tasks["load"].done():
            self._tasks["load"] = asyncio.ensure_future(self._load_queued())

    async def _load_queued(self) -> None:
        """Load the queued models one after another; skip those without a waiting request."""
        while self._queue:
            tenant = next(iter(self._queue))
            model = self._queue[tenant][0]
            async with self._lock:
                if model.num_waiting and not self._is_usable(model):
                    await self._load(model)
            # Move the tenant to the end, so that each other tenant comes first.
            self._queue[tenant] = self._queue.pop(tenant)
            for wanted in self._queue.values():
                if model in wanted:
                    wanted.remove(model)
            self._queue = {each: wanted for each, wanted in self._queue.items() if wanted}
            self._notify()
            # Let the waiting requests of this model start before memory is needed again.
            await asyncio.sleep(0)

    async def _load(self, model: PooledModel) -> None:
        loader = model.loader
        assert loader is not None, (
            "expected a model that can be loaded, found one that was loaded elsewhere"
        )
        try:
            await self._unload(model)  # without effect unless its engine has ended
            model.state = "loading"
            model.error = None
            estimate = await self._loading.run("", loader.estimate)
            if not await self._make_room(model, estimate):
                model.state = "unloaded"
                return
            model.num_bytes = estimate.total
            load = partial(loader.load, self._metrics[model], executor=self.executor)
            self._set_loaded(model, await self._loading.run("", load))
        except Exception as error:  # noqa: BLE001 - any error is that of this model only
            self._set_failed(model, error)
        finally:
            for each in self.models:
                each.retiring = False

    async def _make_room(self, model: PooledModel, estimate: MemoryEstimate) -> bool:
        """Unload other models until ``model`` fits into the memory.

        Returns:
            Whether the model is still needed: False once no request waits for it any more.

        Raises:
            OptionError: the model does not even fit beside the pinned models alone.
        """
        if self.memory is None:
            return True
        pinned = sum(each.num_bytes for each in self.models if each.pinned)
        estimate.check_fits(model.name, self.memory, pinned, "pinned")
        while True:
            loaded = sum(each.num_bytes for each in self.models)
            missing = loaded + estimate.total - self.memory
            if missing <= 0:
                return True
            if not model.num_waiting:
                return False
            others = [each for each in self.models if each.service is not None and not each.pinned]
            others.sort(key=lambda each: (each.num_running > 0, each.last_use))
            if not others[0].num_running:
                await self._unload(others[0])
                continue
            for each in others:
                each.retiring = missing > 0
                missing -= each.num_bytes
            await self._changed.wait()

    async def _unload(self, model: PooledModel) -> None:
        if model.service is None:
            return
        service = model.service
        model.service = None
        model.state = "unloaded"
        self._metrics[model].count_load(None)
        service.close()
        await service.engine.close()
        if model.loader is not None:
            await asyncio.to_thread(model.loader.finish, service)
        del service
        await asyncio.to_thread(ModelLoader.return_memory)
        model.num_bytes = 0
        self._notify()

    def _set_loaded(self, model: PooledModel, service: Service) -> None:
        llm = service.engine.llm
        model.details = {
            "max_model_len": llm.config.context,
            "bits": llm.bits,
            "drafter": llm.get_proposer().name,
            "drafters": [*service.settings.allowed_drafters],
            "known_drafters": service.known_drafters,
            "sampling": sampling_values(recommended_params(llm.config)),
        }
        model.service = service
        model.state = "loaded"
        model.error = None
        model.last_use = monotonic()

    def _set_failed(self, model: PooledModel, error: Exception) -> None:
        """Log why a load failed, and keep the error for the model's requests.

        The message quotes no prompt, so that clients may read it.
        """
        cause = str(error) if isinstance(error, PronkError) else describe_error(error)
        _log.error("the model %s was not loaded: %s", model.name, cause)
        message = f"model {model.name}: {cause}"
        model.error = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, "model_not_loaded")
        model.state = "failed"
        model.num_bytes = 0
        model.retry_at = monotonic() + _RETRY_SECONDS
        self._metrics[model].count_load(None, "failed")

    async def _unload_idle(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds / 10)
            async with self._lock:
                for model in self.models:
                    if model.service is None or model.pinned:
                        continue
                    is_busy = model.num_running > 0 or model.num_waiting > 0
                    if is_busy or monotonic() - model.last_use < seconds:
                        continue
                    await self._unload(model)
                    _log.info(
                        "the model %s was unloaded after %.0f idle seconds", model.name, seconds
                    )
