"""Start of the processes of a model; torch is imported only for ``workers`` above 1."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pronk.architecture.config import ModelConfig
from pronk.checks import check_choice, require_extra
from pronk.errors import OptionError
from pronk.execution.model_runner import ModelRunner
from pronk.kernels.library import Kernels
from pronk.kernels.threads import num_threads
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder

if TYPE_CHECKING:
    from pronk.parallel.processes import WorkerGroup

# Choices of the option ``parallel``: split the branches of token trees, or the heads and columns of each layer.
PARALLEL = ("tree", "tensor")

_LAUNCHED = "TORCHELASTIC_RUN_ID"  # variable that ``torch.distributed.is_torchelastic_launched`` looks for


def is_launched(workers: int) -> bool:
    """Return whether ``torchrun`` launched the processes of the model; if not, they have to be spawned."""
    return workers > 1 and _LAUNCHED in os.environ


def check_launched(workers: int) -> None:
    """Raise ``OptionError`` for ``workers=1`` if ``torchrun`` launched several processes."""
    # Each of these processes would run the whole program.
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if _LAUNCHED in os.environ else 1
    if workers == 1 < world_size:
        msg = f"workers: expected {world_size}, as torchrun has started, found 1; set workers to {world_size}"
        raise OptionError(msg)


class SingleProcess:
    """Substitute for :class:`WorkerGroup` if the model has no worker processes (``workers=1``)."""

    split = None
    pool = None  # ``Backend.make_cache`` chooses the class of the KV cache

    def __init__(self, config: ModelConfig) -> None:
        self.shard_config = config

    def make_runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner | None:
        """Return ``None``: the engine then makes a model runner for this process alone."""

    def end(self) -> None:
        """Do nothing: no processes were started."""


def start_workers(
    workers: int, parallel: str, config: ModelConfig, kernels: Kernels | None, **options: Any
) -> SingleProcess | WorkerGroup:
    """Spawn workers; if ``torchrun`` launched the processes, return in rank 0 and serve in other ranks.

    ``options`` are the other entries of :class:`~pronk.parallel.worker.WorkerSettings`.
    Raises ``OptionError`` if ``workers`` is above 1 without compiled kernels (with torch, a row's bits depend on the
    batch) or without torch (whose processes exchange messages), too large for tensor parallelism, or not the number of
    processes that ``torchrun`` launched.
    """
    check_choice("parallel", parallel, PARALLEL)
    if workers == 1:
        return SingleProcess(config)
    if kernels is None:
        msg = f"workers: expected 1 without the compiled kernels, found {workers}; install the kernels or set 1"
        raise OptionError(msg)
    require_extra("workers", "parallel", "torch")
    from pronk.parallel.processes import WorkerGroup, join_torchrun, spawn_workers  # noqa: PLC0415 - imports torch
    from pronk.parallel.worker import WorkerSettings  # noqa: PLC0415

    names = {name: str(options[name]) for name in ("model", "dtype")}
    others = {"kernels": kernels.name, "threads": num_threads(), "parallel": parallel, "workers": workers}
    settings = WorkerSettings(options | names | others)
    settings.split(0, config)  # raises for too many workers, before a worker is started
    return WorkerGroup(config, settings, (join_torchrun if is_launched(workers) else spawn_workers)(settings))
