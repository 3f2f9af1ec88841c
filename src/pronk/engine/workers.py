"""Choice of what computes the forward passes: this process, several processes, or another device.

This module is the one place that makes a model's runner. A guest registers a function that is
called with the arguments of :func:`start_workers` and returns a :class:`Workers`: for several
processes as the entry point ``processes`` of ``pronk.workers`` (:mod:`pronk.parallel`), for another
device than the CPU as an entry point of ``pronk.devices`` with the name of the device, such as
``cuda``. The engine gives the runner a :class:`~pronk.models.forward_batch.ForwardBatch` per step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pronk.base.arrays import DType
from pronk.base.checks import check_choice
from pronk.base.errors import OptionError
from pronk.base.guests import guests, load_guest
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import ModelConfig
from pronk.engine.options import LLMOptions
from pronk.kernels.library import Kernels
from pronk.models.decoder import Decoder
from pronk.models.model_runner import ModelRunner
from pronk.models.split import TensorSplit

# environment variable that ``torchrun`` sets (``torch.distributed.is_torchelastic_launched``)
_LAUNCHED = "TORCHELASTIC_RUN_ID"


def is_launched(workers: int) -> bool:
    """Return whether ``torchrun`` has started the model's ``workers`` processes.

    If not, this process has to start the others.
    """
    return workers > 1 and _LAUNCHED in os.environ


def check_launched(workers: int) -> None:
    """Raise ``OptionError`` for ``workers=1`` if ``torchrun`` launched several processes."""
    # torchrun starts WORLD_SIZE copies of the program. With ``workers=1`` each copy would load and
    # run the whole model for itself.
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if _LAUNCHED in os.environ else 1
    if workers == 1 < world_size:
        msg = (
            f"workers: expected {world_size}, as torchrun has started, found 1; set workers to "
            f"{world_size}"
        )
        raise OptionError(msg)


class Workers(Protocol):
    """The processes, or the device, that compute a model."""

    @property
    def split(self) -> TensorSplit | None:
        """Shard of this process in tensor parallelism.

        ``None`` if each process has the whole model.
        """

    @property
    def shard_config(self) -> ModelConfig:
        """Config with the sizes of the layers and the KV cache in this process.

        In tensor parallelism these are smaller than the model's.
        """

    @property
    def pool(self) -> Callable[..., PagedCache]:
        """Class of the target's KV cache, or a function with the arguments of the class."""

    @property
    def memory(self) -> int | None:
        """Free bytes of the device's own memory; ``None`` if it uses the machine's."""

    def make_runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner:
        """Return the runner of the target's forward passes."""

    def end(self) -> None:
        """End the other processes, or release the device."""


class SingleProcess:
    """A model that this process computes alone (``workers=1``)."""

    split = None
    pool = PagedCache
    memory = None

    def __init__(self, config: ModelConfig) -> None:
        self.shard_config = config

    def make_runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner:
        """Return a runner of this process."""
        return ModelRunner(decoder, cache)

    def end(self) -> None:
        """Do nothing: no processes were started."""


def start_workers(
    options: LLMOptions, model: Path, dtype: DType, config: ModelConfig, kernels: Kernels
) -> Workers:
    """Return what computes the model, by the options ``device`` and ``workers``.

    Starts the processes of a model, or joins those that ``torchrun`` has started. ``model`` is the
    checkpoint, ``dtype`` that of the weights, and ``kernels`` the CPU's, as the options of these
    names select them.

    Raises:
        OptionError: no installed package computes on ``device``; or ``workers`` is above 1 without
            torch (whose processes exchange messages), or for a model with recurrent layers or
            latent attention; too large for tensor parallelism; or not the number of processes that
            ``torchrun`` launched.
    """
    workers = options.workers
    if options.device != "cpu":
        return _open_device(options, model, dtype, config, kernels)
    if workers == 1:
        return SingleProcess(config)
    if config.recurrent is not None:
        # the processes exchange keys and values of tokens, but no states of recurrent layers
        msg = (
            f"workers: expected 1 for a model with recurrent layers, found {workers}; set 1, or "
            "use replicas"
        )
        raise OptionError(msg)
    if config.latent is not None:
        # all heads share one row of the cache, so the processes cannot share it out by heads
        msg = (
            f"workers: expected 1 for a model with latent attention, found {workers}; set 1, or "
            "use replicas"
        )
        raise OptionError(msg)
    start = load_guest("pronk.workers", "processes", "workers")
    started: Workers = start(options, model, dtype, config, kernels)
    return started


def _open_device(
    options: LLMOptions, model: Path, dtype: DType, config: ModelConfig, kernels: Kernels
) -> Workers:
    """Return what computes the model on another device than the CPU.

    ``options.device`` may have a number, as in ``cuda:1``.
    """
    kind = options.device.partition(":")[0]
    check_choice("device", kind, ("cpu", *guests("pronk.devices")))
    open_device = load_guest("pronk.devices", kind, "device")
    opened: Workers = open_device(options, model, dtype, config, kernels)
    return opened
