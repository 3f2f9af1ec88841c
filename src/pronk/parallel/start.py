"""Start of the processes of a model."""

from __future__ import annotations

from typing import Any

from pronk.backends import Kernels, num_threads
from pronk.checkpoint import ModelConfig
from pronk.parallel.processes import WorkerGroup, join_torchrun, spawn_workers
from pronk.parallel.worker import WorkerSettings
from pronk.serving import is_launched


def start_workers(workers: int, parallel: str, config: ModelConfig, kernels: Kernels, **options: Any) -> WorkerGroup:
    """Spawn workers; if ``torchrun`` launched the processes, return in rank 0 and serve in other ranks.

    Implements :func:`pronk.engine.workers.start_workers`. ``options`` are the other entries of
    :class:`~pronk.parallel.worker.WorkerSettings`.
    """
    names = {name: str(options[name]) for name in ("model", "dtype")}
    others = {"kernels": kernels.name, "threads": num_threads(), "parallel": parallel, "workers": workers}
    settings = WorkerSettings(options | names | others)
    settings.split(0, config)  # raises for too many workers, before a worker is started
    return WorkerGroup(config, settings, (join_torchrun if is_launched(workers) else spawn_workers)(settings))
