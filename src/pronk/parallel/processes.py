"""The processes of a model, spawned by the driver or launched by ``torchrun``; imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any
from weakref import finalize, ref

from pronk import OptionError
from pronk.backends import Decoder, ModelRunner, PagedCache
from pronk.base import ConnectionLostError, describe_error, end_with_parent
from pronk.checkpoint import ModelConfig
from pronk.parallel.connection import MessageKind, PeerConnection, join_launched, open_store
from pronk.parallel.mirrored_cache import MirroredCache
from pronk.parallel.runner import TreeRunner
from pronk.parallel.tensor import AllReduceGroup, SplitCache, TensorParallelExecutor
from pronk.parallel.worker import WorkerSettings, loaded_key, model_properties, serve

_LOAD_TIMEOUT = 600.0  # seconds for all workers to start and load the model
_CONNECT_TIMEOUT = 30.0  # seconds for all workers to connect after they have loaded the model
_POLL_SECONDS = 0.05  # seconds between two checks whether a worker has loaded the model


class WorkerProcesses:
    """Worker processes, either spawned by the driver and ended with it, or those of ``torchrun``.

    ``torchrun`` monitors the processes that it has launched; each ends when its connection is lost.

    Attributes:
        store: rendezvous store of the processes.
        processes: spawned processes, ordered by rank; empty with ``torchrun``.
    """

    def __init__(self, store: Any, processes: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.store = store
        self.processes = processes
        finalize(self, _kill, processes)

    def is_alive(self, rank: int) -> bool:
        """Return whether a worker is running, as far as the driver knows without a message."""
        return not self.processes or self.processes[rank - 1].poll() is None

    def end(self, rank: int | None = None) -> None:
        """End the spawned worker with a rank, or all for ``None``; ended workers are skipped."""
        _kill(self.processes if rank is None else self.processes[rank - 1 : rank])


def spawn_workers(settings: WorkerSettings) -> WorkerProcesses:
    """Spawn the workers of a model on this machine."""
    workers = settings["workers"]
    store = open_store("127.0.0.1", 0, workers, master=True, timeout=_LOAD_TIMEOUT)
    store.set("pronk/setting", json.dumps(settings))
    return WorkerProcesses(store, [_spawn(store.port, rank, workers) for rank in range(1, workers)])


class WorkerGroup:
    """The processes of a model, as seen by the driver (rank 0)."""

    def __init__(
        self, config: ModelConfig, settings: WorkerSettings, processes: WorkerProcesses
    ) -> None:
        self.settings = settings
        self.processes = processes
        # Connections to the workers, opened by :meth:`make_runner`.
        self.peers = list[PeerConnection]()
        # Weak reference to the runner of :meth:`make_runner` under tree parallelism; it returns
        # None without a runner.
        self._tree_runner: Callable[[], TreeRunner | None] = lambda: None
        # The driver's shard of the model under tensor parallelism, else ``None``.
        self.split = settings.split(0, config)
        self.shard_config = config if self.split is None else self.split.shard_config
        self.memory: int | None = None  # the processes use the machine's memory
        # Class of the driver's KV pool.
        self.pool: Callable[..., PagedCache] = MirroredCache if self.split is None else SplitCache

    def end(self) -> None:
        """End the workers that the driver has spawned; a second call does nothing."""
        runner = self._tree_runner()
        if runner is not None:
            runner.drop_workers()
        self.processes.end()

    def make_runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner:
        """Connect to all workers, and return a model runner that divides its work among them.

        Raises:
            OptionError: a worker does not connect, cannot load the model, or has another model.
        """
        properties = model_properties(decoder, cache, self.settings)
        workers = self.settings["workers"]
        self.peers += [self._connect(rank, properties) for rank in range(1, workers)]
        if isinstance(cache, MirroredCache):
            tree_runner = TreeRunner(
                decoder, cache, self.peers, self.processes.is_alive, self.processes.end
            )
            self._tree_runner = ref(tree_runner)
            return tree_runner
        assert isinstance(cache, SplitCache)
        assert self.split is not None
        all_reduce = AllReduceGroup(self.processes.store, 0, workers, timeout=_CONNECT_TIMEOUT)
        executor = TensorParallelExecutor(
            decoder, cache, self.split, all_reduce, peers=self.peers, on_lost=self.processes.end
        )
        return ModelRunner(decoder, cache, executor=executor)

    def _connect(self, rank: int, properties: dict[str, str]) -> PeerConnection:
        """Connect to a worker and compare the properties of its model with the driver's."""
        self._wait_until_loaded(rank)
        try:
            peer = PeerConnection(self.processes.store, rank, driver=True, timeout=_CONNECT_TIMEOUT)
            message = peer.receive(_CONNECT_TIMEOUT)
        except ConnectionLostError as error:
            msg = f"workers: expected {self.settings['workers']} processes, found fewer: {error}"
            raise OptionError(msg) from error
        if message.kind == MessageKind.FAILED:
            msg = f"workers: worker {rank} cannot load the model: {message.text}"
            raise OptionError(msg)
        worker_properties: dict[str, Any] = json.loads(message.text)
        for field, value in properties.items():
            if (found := worker_properties.get(field)) != value:
                msg = (
                    f"workers: expected the same {field} in all, {value}; "
                    f"found {found} in worker {rank}"
                )
                raise OptionError(msg)
        return peer

    def _wait_until_loaded(self, rank: int) -> None:
        """Poll until a worker has loaded the model; a blocking wait would delay Ctrl-C.

        Raises:
            OptionError: the worker has ended, or has not loaded the model in time.
        """
        deadline = monotonic() + _LOAD_TIMEOUT
        while not self.processes.store.check([loaded_key(rank)]):
            if not self.processes.is_alive(rank):
                msg = (
                    f"workers: worker {rank} ended before it had loaded the model; set fewer "
                    "workers if memory ran out"
                )
                raise OptionError(msg)
            if monotonic() > deadline:
                msg = (
                    f"workers: worker {rank} has not loaded the model in {_LOAD_TIMEOUT:g} "
                    "seconds; use fewer workers"
                )
                raise OptionError(msg)
            sleep(_POLL_SECONDS)


def join_torchrun(settings: WorkerSettings) -> WorkerProcesses:
    """Join the processes of ``torchrun``: return in the driver (rank 0), and serve in workers.

    A worker exits at the end of this call.

    Raises:
        OptionError: the number of processes is not ``workers``, or the rendezvous fails.
    """
    try:
        store, rank, world_size = join_launched(_LOAD_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        msg = (
            "workers: expected the processes that torchrun has started, found none: "
            f"{describe_error(error)}"
        )
        raise OptionError(msg) from error
    if world_size != (workers := settings["workers"]):
        msg = (
            f"workers: expected {world_size}, as torchrun has started, found {workers}; set "
            f"workers to {world_size}"
        )
        raise OptionError(msg)
    end_with_parent()
    if rank == 0:
        return WorkerProcesses(store)
    try:
        serve(store, rank, settings, _LOAD_TIMEOUT)
    except ConnectionLostError as error:
        sys.exit(f"pronk: {error}")
    sys.exit(0)


# Python program of a spawned worker. It ignores the terminal's Ctrl-C, which the driver handles,
# and sets sys.path to the driver's, so that the worker imports the same pronk.
_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    f"sys.path[:] = {sys.path!r}; from pronk.parallel.worker import main; main()"
)


def _spawn(port: int, rank: int, workers: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", _PROGRAM, "127.0.0.1", port, rank, workers, _LOAD_TIMEOUT]
    return subprocess.Popen([str(argument) for argument in arguments], stdin=subprocess.PIPE)  # noqa: S603


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
