"""The processes of a model: spawned by the driver, or launched by ``torchrun``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from weakref import finalize, ref

import torch.distributed as dist

from pronk.architecture.config import ModelConfig
from pronk.checks import check_choice
from pronk.errors import OptionError
from pronk.execution.model_runner import ModelRunner
from pronk.kernels.library import Kernels
from pronk.kernels.threads import num_threads
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.parallel.connection import ConnectionLostError, MessageKind, PeerConnection, open_store
from pronk.parallel.mirrored_cache import MirroredCache
from pronk.parallel.runner import TreeRunner
from pronk.parallel.split_cache import SplitCache
from pronk.parallel.tensor import AllReduceGroup, TensorParallelExecutor
from pronk.parallel.worker import WorkerSettings, loaded_key, model_properties, serve

__all__ = ["PARALLEL", "SingleProcess", "WorkerGroup", "check_launched", "is_launched", "start_workers"]

_c10d: Any = dist  # the type stubs lack some of its names

# Choices of the option ``parallel``: split the branches of token trees, or the heads and columns of each layer.
PARALLEL = ("tree", "tensor")

# Timeout in seconds for all workers to start and load the model.
_TIMEOUT = 600.0
# Timeout in seconds for all workers to connect after they have loaded the model.
_CONNECT_TIMEOUT = 30.0
# Seconds between two checks whether a worker has loaded the model.
_POLL_SECONDS = 0.05


def is_launched(workers: int) -> bool:
    """Return whether ``torchrun`` launched this process as one of several with a model."""
    return workers > 1 and dist.is_torchelastic_launched()


def check_launched(workers: int) -> None:
    """Refuse one worker in each of several processes of ``torchrun``: each would run everything.

    Raises:
        OptionError: ``torchrun`` launched several processes.
    """
    found = int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1
    if workers == 1 < found:
        msg = f"workers: expected {found}, as torchrun has started, found 1; set workers to {found}"
        raise OptionError(msg)


class SingleProcess:
    """A model in this process alone, with the interface of :class:`WorkerGroup`."""

    split = None
    pool: type[PagedCache] = PagedCache

    def __init__(self, config: ModelConfig) -> None:
        self.shard_config = config

    def runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner | None:
        """Return ``None``: the engine makes its own model runner."""

    def end(self) -> None:
        """Do nothing: no processes were started."""


class SpawnedProcesses:
    """Worker processes on this machine, spawned by the driver and ended with it."""

    def __init__(self, setting: WorkerSettings) -> None:
        workers = setting["workers"]
        self.store = open_store("127.0.0.1", 0, workers, master=True, timeout=_TIMEOUT)  # for the rendezvous
        self.store.set("pronk/setting", json.dumps(setting))
        self.processes = [_spawn(self.store.port, rank, workers) for rank in range(1, workers)]
        self._end_all = finalize(self, _kill, self.processes)

    def alive(self, rank: int) -> bool:
        """Return whether a worker process is running, without communication."""
        return self.processes[rank - 1].poll() is None

    def end(self, rank: int | None = None) -> None:
        """End the worker with this rank, or all workers if ``rank`` is ``None``; idempotent."""
        if rank is None:
            self._end_all()
        else:
            _kill(self.processes[rank - 1 : rank])


class LaunchedProcesses:
    """Worker processes launched by ``torchrun``; each ends when its connection is lost."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def alive(self, rank: int) -> bool:
        """Return True, because ``torchrun`` monitors the processes."""
        del rank
        return True

    def end(self, rank: int | None = None) -> None:
        """Do nothing: a worker ends when its connection is lost."""


class WorkerGroup:
    """The processes of a model, as seen by the driver (rank 0).

    Attributes:
        setting: settings that all processes load.
        split: the driver's part of the model under tensor parallelism, else ``None``.
        shard_config: configuration of the driver's part of the model, or of the whole model.
        pool: class of the KV cache.
        processes: worker processes.
        peers: connections to the workers; empty before :meth:`runner`.
    """

    def __init__(
        self, config: ModelConfig, setting: WorkerSettings, processes: SpawnedProcesses | LaunchedProcesses
    ) -> None:
        self.setting, self.processes, self.peers = setting, processes, list[PeerConnection]()
        self._tree_runner: Callable[[], TreeRunner | None] = lambda: None  # a weak reference once it exists
        self.split = setting.split(0, config)
        self.shard_config = config if self.split is None else self.split.shard_config
        self.pool: type[PagedCache] = MirroredCache if self.split is None else SplitCache

    def end(self) -> None:
        """End the spawned workers; idempotent."""
        runner = self._tree_runner()
        if runner is not None:
            runner.drop_workers()
        self.processes.end()

    def runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner:
        """Connect to all workers and return the model runner.

        Raises:
            OptionError: a worker does not connect, cannot load the model, or has another model.
        """
        properties, workers = model_properties(decoder, cache, self.setting), self.setting["workers"]
        self.peers += [self._connect(rank, properties) for rank in range(1, workers)]
        if isinstance(cache, MirroredCache):
            tree_runner = TreeRunner(decoder, cache, self.peers, self.processes.alive, self.processes.end)
            self._tree_runner = ref(tree_runner)
            return tree_runner
        assert isinstance(cache, SplitCache)
        assert self.split is not None
        assert decoder.kernels is not None
        all_reduce = AllReduceGroup(self.processes.store, 0, workers, timeout=_CONNECT_TIMEOUT)
        executor = TensorParallelExecutor(
            decoder.kernels, decoder, cache, self.split, all_reduce, peers=self.peers, on_lost=self.processes.end
        )
        return ModelRunner(decoder, cache, executor=executor)

    def _connect(self, rank: int, properties: dict[str, str]) -> PeerConnection:
        """Connect to a worker and compare the properties of its model with the driver's."""
        self._wait_until_loaded(rank)
        try:
            peer = PeerConnection(self.processes.store, rank, driver=True, timeout=_CONNECT_TIMEOUT)
            message = peer.receive(_CONNECT_TIMEOUT)
        except ConnectionLostError as error:
            msg = f"workers: expected {self.setting['workers']} processes, found fewer: {error}"
            raise OptionError(msg) from error
        if message.kind == MessageKind.FAILED:
            msg = f"workers: worker {rank} cannot load the model: {message.text}"
            raise OptionError(msg)
        worker_properties: dict[str, Any] = json.loads(message.text)
        for field, own in properties.items():
            found = worker_properties.get(field)
            if found != own:
                msg = f"workers: expected the same {field} in all, {own}; found {found} in worker {rank}"
                raise OptionError(msg)
        return peer

    def _wait_until_loaded(self, rank: int) -> None:
        """Wait until a worker has loaded the model; polling lets Ctrl-C interrupt."""
        end = monotonic() + _TIMEOUT
        while not self.processes.store.check([loaded_key(rank)]):
            if not self.processes.alive(rank):
                msg = (
                    f"workers: worker {rank} ended before it had loaded the model; set fewer workers if memory ran out"
                )
                raise OptionError(msg)
            if monotonic() > end:
                msg = f"workers: worker {rank} has not loaded the model in {_TIMEOUT:.0f} seconds; use fewer workers"
                raise OptionError(msg)
            sleep(_POLL_SECONDS)


def start_workers(
    workers: int, parallel: str, config: ModelConfig, kernels: Kernels | None, **setting: Any
) -> SingleProcess | WorkerGroup:
    """Start the worker processes, or join those of ``torchrun``; in a worker this never returns.

    Args:
        workers: number of processes, this one included.
        parallel: kind of parallelism, one of :data:`PARALLEL`.
        config: configuration of the model.
        kernels: compiled kernels, or ``None`` for torch.
        setting: entries of :class:`~pronk.parallel.worker.WorkerSettings`.

    Raises:
        OptionError: ``workers`` is above 1 without compiled kernels, which bit-identical rows need; or more than the
            heads; or not the number of processes that ``torchrun`` launched.
    """
    check_choice("parallel", parallel, PARALLEL)
    if workers == 1:
        return SingleProcess(config)
    if kernels is None:
        msg = f"workers: expected 1 without the compiled kernels, found {workers}; install the kernels or set 1"
        raise OptionError(msg)
    dtype = str(setting["dtype"]).removeprefix("torch.")
    own = {"model": str(setting["model"]), "dtype": dtype, "kernels": kernels.name, "threads": num_threads()}
    settings = WorkerSettings(setting | own | {"parallel": parallel, "workers": workers})
    settings.split(0, config)  # raises for more workers than heads, before any worker starts
    return WorkerGroup(
        config, settings, _join_launched(settings) if is_launched(workers) else SpawnedProcesses(settings)
    )


def _join_launched(setting: WorkerSettings) -> LaunchedProcesses:
    """Join the processes of ``torchrun``; return in rank 0, serve as a worker until exit in other ranks.

    Raises:
        OptionError: the number of processes is not ``workers``, or the rendezvous fails.
    """
    try:
        store, rank, found = next(_c10d.rendezvous("env://", timeout=timedelta(seconds=_TIMEOUT)))
    except (RuntimeError, ValueError) as error:
        msg = f"workers: expected the processes that torchrun has started, found none: {str(error).splitlines()[0]}"
        raise OptionError(msg) from error
    if found != setting["workers"]:
        msg = f"workers: expected {found}, as torchrun has started, found {setting['workers']}; set workers to {found}"
        raise OptionError(msg)
    if rank == 0:
        return LaunchedProcesses(store)
    try:
        serve(store, rank, setting, _TIMEOUT)
    except ConnectionLostError as error:
        sys.exit(f"pronk: {error}")
    sys.exit(0)


# Program of a spawned worker. The worker ignores the terminal's Ctrl-C, which the driver handles, and has the sys.path
# of the driver, so that it imports the same pronk.
_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    f"sys.path[:] = {sys.path!r}; from pronk.parallel.worker import main; main()"
)


def _spawn(port: int, rank: int, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _PROGRAM, "127.0.0.1", port, rank, workers, _TIMEOUT]
    return subprocess.Popen([str(each) for each in command], stdin=subprocess.PIPE)  # noqa: S603 - this interpreter


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
