"""Models of one server: loaded on demand, unloaded when they are idle or when memory runs short."""

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
from typing import Any, Literal

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

_log = logging.getLogger(__name__)
# pause after a failed load, in which requests of the model get the error at once
_RETRY_SECONDS = 30.0


@dataclass(eq=False)
class PooledModel:
    """A model of a :class:`ModelPool`, and its state; changed by the event loop only."""

    names: AdapterNames  # of the model and its adapters
    loader: ModelLoader | None  # ``None``: the model was loaded elsewhere, and stays loaded
    pinned: bool = False  # never unloaded
    state: Literal["unloaded", "loading", "loaded", "failed"] = "unloaded"
    service: Service | None = None  # set if the state is ``loaded``
    num_running: int = 0  # number of requests that use ``service``
    num_waiting: int = 0  # number of requests that wait for it
    # whether new requests wait, because the memory is needed for another model
    retiring: bool = False
    last_use: float = 0.0  # time of the end of the last request, or of the load (``monotonic``)
    num_bytes: int = 0  # estimated memory, from the start of the load to the end of the unloading
    error: ApiError | None = None  # reason of the state ``failed``
    retry_at: float = 0.0  # time of the end of the pause after a failure (``monotonic``)
    # properties that are known after the first load
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the model itself."""
        return self.names.model

    def describe(self) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models``: that of the model, and those of its adapters."""
        described = {
            "object": "model",
            "created": 0,
            "owned_by": "pronk",
            "state": self.state,
        } | self.details
        described |= {} if self.error is None else {"error": self.error.message}
        return [
            {"id": each, "parent": None if each == self.name else self.name} | described
            for each in self.names.all
        ]


class ModelPool:
    """The models of one server.

    Requests for a model that is not loaded wait until it is. One model loads at a time, in a
    thread, while the others go on. Of several tenants, each has a share of the places to wait, and
    models are loaded for them in turns; within a tenant, in the order in which its requests
    arrived.

    If memory is short, idle models are unloaded first, the least recently used one before others.
    If all are busy, new requests of the least recently used one wait until its running requests
    have ended; then it is unloaded. This also keeps a stream of requests for one model from
    blocking the others.

    Attributes:
        models: all models; the first one answers requests that name no model.
        settings: settings that the models share.
        metrics: metrics of the first model; their registry has those of all models.
        executor: threads for what depends on the size of a request, of all models together.
        draining: whether the server is shutting down and refuses new requests.
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
        # of which the end of the process does not wait for a job
        self._loading = FairExecutor(1, "pronk-models")
        self._metrics = {model: self.metrics.for_model(model.name) for model in models[1:]} | {
            models[0]: self.metrics
        }
        self._idle_seconds = idle_seconds
        # A single model is not reloaded after its engine has ended; /ready reports it to the
        # supervisor.
        self._reloads = len(models) > 1 or idle_seconds is not None
        # Requests that wait for a model to be loaded.
        self._waiting = AdmissionLimit(settings.limits.requests, shared=settings.is_shared)
        # Models to load, by the tenants whose requests wait for them. The first model of the first
        # tenant is the one that is being loaded. Afterwards the first tenant goes behind the
        # others.
        self._queue: dict[str, list[PooledModel]] = {}
        self._lock = asyncio.Lock()  # held while a model is loaded or unloaded
        # set, and replaced, when the state of a model or a count has changed
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
        """Whether a request waits or runs."""
        return any(
            model.num_running
            or model.num_waiting
            or (model.service is not None and model.service.is_busy)
            for model in self.models
        )

    def find(self, name: str | None) -> PooledModel:
        """Return the model with a name or adapter, the first one for ``None``.

        Raise ``ApiError`` without one.
        """
        for model in self.models:
            if name is None or name in model.names:
                return model
        raise unknown_model(str(name), *(each for model in self.models for each in model.names.all))

    async def is_ready(self) -> bool:
        """Return whether requests are accepted, and at least one model is loaded and works, or can be loaded."""
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
        """Yield the chunks of the reply; see :meth:`Service.stream`."""
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
        """Yield the service of a model for a request, and the time of the call (``perf_counter``).

        The model stays loaded within the ``async with`` block.

        Raises:
            ApiError: the server is shutting down, there is no such model, or it cannot be loaded.
            DeadlineError: the model was not loaded by the deadline of the request.
            OverloadedError: too many requests wait, of all tenants or of this one.
        """
        if self.draining:
            msg = (
                "expected a running server, found one that is shutting down; send the request to "
                "another server"
            )
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, msg, "draining", headers={"Retry-After": "5"}
            )
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
            OptionError: it does not fit into the memory beside the models that are loaded.
        """
        assert model.loader is not None, "expected a model that is not loaded, found a loaded one"
        if self.memory is not None:
            estimate = model.loader.estimate()
            estimate.check_fits(
                model.name, self.memory, sum(each.num_bytes for each in self.models), "loaded"
            )
            model.num_bytes = estimate.total
        self._set_loaded(
            model, model.loader.load(self._metrics[model], progress, executor=self.executor)
        )

    def start(self) -> None:
        """Start to unload idle models; called in the event loop."""
        if self._idle_seconds is not None:
            self._tasks["idle"] = asyncio.ensure_future(self._unload_idle(self._idle_seconds))

    def stop(self) -> None:
        """Start no more loads.

        Stop all engines after their current step, and the threads after their jobs.
        """
        for task in self._tasks.values():
            task.cancel()
        self.executor.shutdown()
        self._loading.shutdown()
        for model in self.models:
            if model.service is not None:
                model.service.close()

    async def close(self) -> None:
        """Call :meth:`stop`, and wait for the engines."""
        self.stop()
        for task in self._tasks.values():
            with suppress(asyncio.CancelledError):
                await task
        for model in self.models:
            if model.service is not None:
                await model.service.engine.close()

    def finish(self) -> None:
        """Save what the loaded models have learned, and close them.

        Called after the end of the event loop.
        """
        for model in self.models:
            if model.service is not None and model.loader is not None:
                model.loader.finish(model.service)

    def _is_usable(self, model: PooledModel) -> bool:
        if model.service is None or model.retiring:
            return False
        return model.service.engine.alive or not self._reloads

    async def _service_of(self, model: PooledModel, tenant: str, ends_at: float) -> Service:
        """Return the service of a model, once it is loaded; errors are those of :meth:`use`."""
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
            self._queue[tenant] = self._queue.pop(tenant)  # behind the other tenants
            for wanted in self._queue.values():
                if model in wanted:
                    wanted.remove(model)
            self._queue = {each: wanted for each, wanted in self._queue.items() if wanted}
            self._notify()
            # let the waiting requests of this model start before memory is needed again
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
        """Unload other models until ``model`` fits.

        Return False if no request waits for it any more.

        Raises ``OptionError`` if the model does not even fit beside the pinned models alone.
        """
        if self.memory is None:
            return True
        pinned = sum(each.num_bytes for each in self.models if each.pinned)
        estimate.check_fits(model.name, self.memory, pinned, "pinned")
        while (
            missing := sum(each.num_bytes for each in self.models) + estimate.total - self.memory
        ) > 0:
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
        return True

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
        drafters = [*service.settings.allowed_drafters]
        names = {"drafter": llm.get_proposer().name, "drafters": drafters}
        sampling = {"sampling": sampling_values(recommended_params(llm.config))}
        model.details = {"max_model_len": llm.config.context} | names | sampling
        model.service = service
        model.state = "loaded"
        model.error = None
        model.last_use = monotonic()

    def _set_failed(self, model: PooledModel, error: Exception) -> None:
        """Keep the cause for the model's own requests.

        They may see the message, which quotes no prompt.
        """
        cause = str(error) if isinstance(error, PronkError) else describe_error(error)
        _log.error("the model %s was not loaded: %s", model.name, cause)
        model.error = ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE, f"model {model.name}: {cause}", "model_not_loaded"
        )
        model.state = "failed"
        model.num_bytes = 0
        model.retry_at = monotonic() + _RETRY_SECONDS
        self._metrics[model].count_load(None, "failed")

    async def _unload_idle(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds / 10)
            async with self._lock:
                for model in self.models:
                    idle = not (model.pinned or model.num_running or model.num_waiting)
                    if (
                        idle
                        and model.service is not None
                        and monotonic() - model.last_use >= seconds
                    ):
                        await self._unload(model)
                        _log.info(
                            "the model %s was unloaded after %.0f idle seconds", model.name, seconds
                        )
