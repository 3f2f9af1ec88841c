"""The processes of a model: spawned by the driver, or launched by ``torchrun``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Protocol
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
from pronk.parallel.worker import WorkerSettings, identity, loaded_key, serve

__all__ = ["PARALLEL", "SingleProcess", "WorkerGroup", "check_launched", "is_launched", "start_workers"]

_c10d: Any = dist  # the type stubs lack some of its names

# Choices of the option parallel: split branches of token trees, or heads and columns.
PARALLEL = ("tree", "tensor")

# Seconds for all workers to start and load the model.
_TIMEOUT = 600.0
# Seconds for all workers to connect after that.
_CONNECT_TIMEOUT = 30.0
# Seconds between two polls for a loaded worker.
_POLL = 0.05


def is_launched(workers: int) -> bool:
    """Return whether ``torchrun`` launched the processes of a model with several workers."""
    return workers > 1 and dist.is_torchelastic_launched()


def check_launched(workers: int) -> None:
    """Check that ``torchrun`` launched one process if ``workers`` is 1; several would each run everything.

    Raises:
        OptionError: ``torchrun`` launched several processes.
    """
    found = int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1
    if workers == 1 < found:
        msg = f"workers: expected {found}, as torchrun has started, found 1; set workers to {found}"
        raise OptionError(msg)


class SingleProcess:
    """A model in this process alone."""

    split = None
    pool: type[PagedCache] = PagedCache

    def __init__(self, config: ModelConfig) -> None:
        self.shard_config = config

    def runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner | None:
        """Return ``None``: the engine makes its own model runner."""

    def end(self) -> None:
        """Do nothing: no processes were started."""


class WorkerProcesses(Protocol):
    """The worker processes and their rendezvous store.

    Attributes:
        store: rendezvous store of ``torch.distributed``.
    """

    store: Any

    def alive(self, rank: int) -> bool:
        """Return whether a worker runs, without communication."""
        ...

    def end(self, rank: int | None = None) -> None:
        """End one worker, or all; idempotent."""
        ...


class SpawnedProcesses:
    """Worker processes on this machine, spawned by the driver and ended with it."""

    def __init__(self, setting: WorkerSettings) -> None:
        workers = setting["workers"]
        self.store = open_store("127.0.0.1", 0, workers, master=True, timeout=_TIMEOUT)
        self.store.set("pronk/setting", json.dumps(setting))
        arguments = (self.store.port, workers, _TIMEOUT)
        self.processes = [_start(rank, *arguments) for rank in range(1, workers)]
        self._end = finalize(self, _end, self.processes)

    def alive(self, rank: int) -> bool:
        """Implement :meth:`WorkerProcesses.alive`."""
        return self.processes[rank - 1].poll() is None

    def end(self, rank: int | None = None) -> None:
        """Implement :meth:`WorkerProcesses.end`."""
        if rank is None:
            self._end()
        else:
            _end(self.processes[rank - 1 : rank])


class LaunchedProcesses:
    """Worker processes launched by ``torchrun``; each ends when its connection is lost."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def alive(self, rank: int) -> bool:
        """Return True: ``torchrun`` watches its processes."""
        del rank
        return True

    def end(self, rank: int | None = None) -> None:
        """Do nothing: a worker ends when its connection is lost."""


class WorkerGroup:
    """The processes of a model, as seen by the driver (rank 0).

    Attributes:
        setting: settings that all processes load.
        split: the driver's part of the model under tensor parallelism, else ``None``.
        shard_config: configuration of that part, or of the whole model.
        pool: class of the KV cache.
        processes: worker processes.
        peers: connections to the workers, once connected.
    """

    def __init__(self, config: ModelConfig, setting: WorkerSettings, processes: WorkerProcesses) -> None:
        self.setting, self.processes, self.peers = setting, processes, list[PeerConnection]()
        self._made: Callable[[], TreeRunner | None] = lambda: None
        self.split = setting.split(0, config)
        self.shard_config = config if self.split is None else self.split.shard_config
        self.pool: type[PagedCache] = MirroredCache if self.split is None else SplitCache

    def end(self) -> None:
        """End the spawned workers; idempotent."""
        runner = self._made()
        if runner is not None:
            runner.drop_workers()
        self.processes.end()

    def runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner:
        """Connect to all workers and return the model runner.

        Raises:
            OptionError: a worker does not connect, cannot load the model, or has another model.
        """
        own_identity, workers = identity(decoder, cache, self.setting), self.setting["workers"]
        self.peers += [self._connect(rank, own_identity) for rank in range(1, workers)]
        if isinstance(cache, MirroredCache):
            made = TreeRunner(decoder, cache, self.peers, self.processes.alive, self.processes.end)
            self._made = ref(made)
            return made
        assert isinstance(cache, SplitCache)
        assert self.split is not None
        assert decoder.kernels is not None
        all_reduce = AllReduceGroup(self.processes.store, 0, workers, timeout=_CONNECT_TIMEOUT)
        end = self.processes.end
        executor = TensorParallelExecutor(
            decoder.kernels, decoder, cache, self.split, all_reduce, peers=self.peers, on_lost=end
        )
        return ModelRunner(decoder, cache, executor=executor)

    def _connect(self, rank: int, identity: dict[str, str]) -> PeerConnection:
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
        worker_identity: dict[str, Any] = json.loads(message.text)
        for field, own in identity.items():
            if worker_identity.get(field) != own:
                found = worker_identity.get(field)
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
            sleep(_POLL)


def start_workers(
    workers: int, parallel: str, config: ModelConfig, kernels: Kernels | None, **setting: Any
) -> SingleProcess | WorkerGroup:
    """Start or find the processes of a model; in workers launched by ``torchrun`` this never returns.

    Args:
        workers: number of processes, this one included.
        parallel: kind of parallelism, one of :data:`PARALLEL`.
        config: configuration of the model.
        kernels: compiled kernels, or ``None`` for torch.
        setting: entries of :class:`~pronk.parallel.worker.WorkerSettings`.

    Raises:
        OptionError: several workers without compiled kernels, which bit-identical rows need; more processes than heads;
            or a number of processes other than ``torchrun`` launched.
    """
    check_choice("parallel", parallel, PARALLEL)
    if workers == 1:
        return SingleProcess(config)
    if kernels is None:
        msg = f"workers: expected 1 without the compiled kernels, found {workers}; install the kernels or set 1"
        raise OptionError(msg)
    kind = str(setting["dtype"]).removeprefix("torch.")
    own = {"model": str(setting["model"]), "dtype": kind, "kernels": kernels.name, "threads": num_threads()}
    settings = WorkerSettings(setting | own | {"parallel": parallel, "workers": workers})
    settings.split(0, config)  # raises for more workers than heads, before any worker starts
    return WorkerGroup(config, settings, _find(settings) if is_launched(workers) else SpawnedProcesses(settings))


def _find(setting: WorkerSettings) -> LaunchedProcesses:
    """Connect the processes of ``torchrun``; return in rank 0 only, the others serve until they exit.

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


# Workers ignore the terminal's Ctrl-C, which the driver handles. They inherit sys.path, so that they import the same
# pronk.
_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    f"sys.path[:] = {sys.path!r}; from pronk.parallel.worker import main; main()"
)


def _start(rank: int, *arguments: float) -> subprocess.Popen[bytes]:
    port, workers, timeout = arguments
    command = [sys.executable, "-c", _PROGRAM, "127.0.0.1", port, rank, workers, timeout]
    return subprocess.Popen([str(each) for each in command], stdin=subprocess.PIPE)  # noqa: S603 - this interpreter


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
