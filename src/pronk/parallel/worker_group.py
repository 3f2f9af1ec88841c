"""The processes that a model is computed by: started here, or found where ``torchrun`` has started them."""

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

__all__ = ["PARALLEL", "SingleProcess", "WorkerGroup", "check_launched", "gather", "is_launched"]

_c10d: Any = dist  # of whose names the type stubs know a part

# What is dealt to the workers: branches of trees, or heads and columns.
PARALLEL = ("tree", "tensor")

# Seconds until all have come, and have loaded the model.
_PATIENCE = 600.0
# And then until they have met.
_MEETING = 30.0
# Between two looks whether one has.
_LOOK = 0.05


def is_launched(workers: int) -> bool:
    """Whether ``torchrun`` has started the processes of a model that is to have several."""
    return workers > 1 and dist.is_torchelastic_launched()


def check_launched(workers: int) -> None:
    """Where one process is asked for, ``torchrun`` must not have started several, each of which would do it all.

    Raises:
        OptionError: it has.
    """
    found = int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1
    if workers == 1 < found:
        msg = f"workers: expected {found}, as torchrun has started, found 1"
        raise OptionError(msg)


class SingleProcess:
    """A model that this process has for itself."""

    split = None
    pool: type[PagedCache] = PagedCache

    def __init__(self, config: ModelConfig) -> None:
        self.share = config

    def runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner | None:
        """What makes the model's passes, if nothing simple does."""

    def end(self) -> None:
        """There is nobody to end."""


class WorkerProcesses(Protocol):
    """The others, and where all find each other.

    Attributes:
        store: a ``torch.distributed`` store.
    """

    store: Any

    def alive(self, rank: int) -> bool:
        """Whether one has not ended, as far as can be told without asking it."""
        ...

    def end(self, rank: int | None = None) -> None:
        """End one, or all; harmless if they have ended."""
        ...


class SpawnedProcesses:
    """Processes of our own, on this machine, which end with this one."""

    def __init__(self, setting: WorkerSettings) -> None:
        workers = setting["workers"]
        self.store = open_store("127.0.0.1", 0, workers, master=True, patience=_PATIENCE)
        self.store.set("pronk/setting", json.dumps(setting))
        place = (self.store.port, workers, _PATIENCE)
        self.processes = [_start(rank, *place) for rank in range(1, workers)]
        self._end = finalize(self, _end, self.processes)

    def alive(self, rank: int) -> bool:
        """See :class:`WorkerProcesses`."""
        return self.processes[rank - 1].poll() is None

    def end(self, rank: int | None = None) -> None:
        """See :class:`WorkerProcesses`."""
        if rank is None:
            self._end()
        else:
            _end(self.processes[rank - 1 : rank])


class LaunchedProcesses:
    """Processes that ``torchrun`` has started, which it ends; ours end when the connection does."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def alive(self, rank: int) -> bool:
        """See :class:`WorkerProcesses`."""
        del rank
        return True

    def end(self, rank: int | None = None) -> None:
        """See :class:`WorkerProcesses`."""


class WorkerGroup:
    """The processes of a model, of which this one is the first.

    Attributes:
        setting: what all of them load.
        split: this one's part of the model, if not each has all of it.
        share: the shape of that part.
        pool: the kind of its cache.
        processes: the others.
        peers: the others, once they have come.
    """

    def __init__(self, config: ModelConfig, setting: WorkerSettings, processes: WorkerProcesses) -> None:
        self.setting, self.processes, self.peers = setting, processes, list[PeerConnection]()
        self._made: Callable[[], TreeRunner | None] = lambda: None
        self.split = setting.split(0, config)
        self.share = config if self.split is None else self.split.share
        self.pool: type[PagedCache] = MirroredCache if self.split is None else SplitCache

    def end(self) -> None:
        """End those that were started here; harmless if they have ended."""
        runner = self._made()
        if runner is not None:
            runner.dismiss()
        self.processes.end()

    def runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner:
        """What makes the model's passes, once all have come.

        Raises:
            OptionError: one does not come, cannot load the model, or has another one.
        """
        mine, workers = identity(decoder, cache, self.setting), self.setting["workers"]
        self.peers += [self._get_proposer(rank, mine) for rank in range(1, workers)]
        if isinstance(cache, MirroredCache):
            made = TreeRunner(decoder, cache, self.peers, self.processes.alive, self.processes.end)
            self._made = ref(made)
            return made
        assert isinstance(cache, SplitCache)
        assert self.split is not None
        assert decoder.kernels is not None
        everybody = AllReduceGroup(self.processes.store, 0, workers, patience=_MEETING)
        end = self.processes.end
        passes = TensorParallelExecutor(
            decoder.kernels, decoder, cache, self.split, everybody, peers=self.peers, lost=end
        )
        return ModelRunner(decoder, cache, passes=passes)

    def _get_proposer(self, rank: int, identity: dict[str, str]) -> PeerConnection:
        self._await(rank)
        try:
            peer = PeerConnection(self.processes.store, rank, driver=True, patience=_MEETING)
            message = peer.receive(_MEETING)
        except ConnectionLostError as error:
            msg = f"workers: expected {self.setting['workers']} processes, found that {error}"
            raise OptionError(msg) from error
        if message.kind == MessageKind.FAILED:
            msg = f"workers: worker {rank} cannot load the model: {message.text}"
            raise OptionError(msg)
        theirs: dict[str, Any] = json.loads(message.text)
        for what, own in identity.items():
            if theirs.get(what) != own:
                msg = f"workers: expected the same {what} in all, {own}; found {theirs.get(what)} in worker {rank}"
                raise OptionError(msg)
        return peer

    def _await(self, rank: int) -> None:
        """Until a worker has loaded the model, or is gone; Ctrl-C strikes in between."""
        end = monotonic() + _PATIENCE
        while not self.processes.store.check([loaded_key(rank)]):
            if not self.processes.alive(rank):
                msg = f"workers: worker {rank} ended before it had loaded the model; is there memory for all of them?"
                raise OptionError(msg)
            if monotonic() > end:
                msg = f"workers: worker {rank} has not loaded the model in {_PATIENCE:.0f} seconds"
                raise OptionError(msg)
            sleep(_LOOK)


def gather(
    workers: int, parallel: str, config: ModelConfig, kernels: Kernels | None, **setting: Any
) -> SingleProcess | WorkerGroup:
    """The processes of a model; where ``torchrun`` has started them, all but the first stay in here to their end.

    Args:
        workers: how many there are to be.
        parallel: what is dealt to them, one of :data:`PARALLEL`.
        config: of the model.
        kernels: who computes.
        setting: as the worker's :class:`~pronk.parallel.worker.WorkerSettings`, with the objects that the model has.

    Raises:
        OptionError: there are no kernels, without which equal bits are not to be had; fewer heads than processes; or
            another number of processes than ``torchrun`` has started.
    """
    check_choice("parallel", parallel, PARALLEL)
    if workers == 1:
        return SingleProcess(config)
    if kernels is None:
        msg = f"workers: expected 1 where torch computes, as rows have other bits in other company, found {workers}"
        raise OptionError(msg)
    kind = str(setting["dtype"]).removeprefix("torch.")
    own = {"model": str(setting["model"]), "dtype": kind, "kernels": kernels.name, "threads": num_threads()}
    told = WorkerSettings(setting | own | {"parallel": parallel, "workers": workers})
    told.split(0, config)  # more workers than heads: before any of them begins
    return WorkerGroup(config, told, _find(told) if is_launched(workers) else SpawnedProcesses(told))


def _find(setting: WorkerSettings) -> LaunchedProcesses:
    """The processes that ``torchrun`` has started; does not return in any but the first.

    Raises:
        OptionError: they are others than expected, or they do not find each other.
    """
    try:
        store, rank, found = next(_c10d.rendezvous("env://", timeout=timedelta(seconds=_PATIENCE)))
    except (RuntimeError, ValueError) as error:
        msg = f"workers: expected the processes that torchrun has started, found none: {str(error).splitlines()[0]}"
        raise OptionError(msg) from error
    if found != setting["workers"]:
        msg = f"workers: expected {found}, as torchrun has started, found {setting['workers']}"
        raise OptionError(msg)
    if rank == 0:
        return LaunchedProcesses(store)
    try:
        serve(store, rank, setting, _PATIENCE)
    except ConnectionLostError as error:
        sys.exit(f"pronk: {error}")
    sys.exit(0)


# The terminal's Ctrl-C is for this process alone. The path of modules is handed on, so that a worker is of this very
# pronk.
_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    f"sys.path[:] = {sys.path!r}; from pronk.parallel.worker import main; main()"
)


def _start(rank: int, *place: float) -> subprocess.Popen[bytes]:
    port, workers, patience = place
    command = [sys.executable, "-c", _PROGRAM, "127.0.0.1", port, rank, workers, patience]
    return subprocess.Popen([str(each) for each in command], stdin=subprocess.PIPE)  # noqa: S603 - ourselves


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
