"""Start of the worker processes of a model."""

from __future__ import annotations

from pathlib import Path

from pronk.backends import Kernels, Workers, num_threads
from pronk.base.arrays import DType
from pronk.checkpoint import ModelConfig
from pronk.parallel.processes import WorkerGroup, join_torchrun, spawn_workers
from pronk.parallel.worker import WorkerSettings
from pronk.serving import LLMOptions, is_launched


def start_workers(
    options: LLMOptions, model: Path, dtype: DType, config: ModelConfig, kernels: Kernels
) -> Workers:
    """Spawn the workers of a model, for :func:`pronk.engine.workers.start_workers`.

    If ``torchrun`` launched the processes, the call returns in rank 0, and serves in other ranks.
    """
    settings = WorkerSettings(
        model=str(model),
        dtype=str(dtype),
        context=options.context,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
        kernels=kernels.name,
        bits=kernels.bits,
        threads=num_threads(),
        parallel=options.parallel,
        workers=options.workers,
    )
    settings.split(0, config)  # too many workers raise an error before a worker starts
    return WorkerGroup(
        config,
        settings,
        (join_torchrun if is_launched(options.workers) else spawn_workers)(settings),
    )
