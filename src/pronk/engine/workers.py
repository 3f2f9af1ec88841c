"""Interface to the processes that compute a model together, and its form for one process.

A guest registers a function by the entry point ``processes`` of ``pronk.workers``; pronk's own is
in :mod:`pronk.parallel`. It is called with the arguments of :func:`start_workers`, and returns a
:class:`Workers`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from pronk.base.arrays import DType
from pronk.base.errors import OptionError
from pronk.base.guests import load_guest
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
    """The processes that compute a model together, as the first of them sees them."""

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
    def pool(self) -> type[PagedCache] | None:
        """Class of the KV cache that all processes share; ``None``: the backend's own class."""

    def make_runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner:
        """Return a runner that uses all processes."""

    def end(self) -> None:
        """End the other processes."""


class SingleProcess:
    """A model that this process computes alone (``workers=1``)."""

    split = None
    pool = None

    def __init__(self, config: ModelConfig) -> None:
        self.shard_config = config

    def make_runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner:
        """Return a runner of this process."""
        return ModelRunner(decoder, cache)

    def end(self) -> None:
        """Do nothing: no processes were started."""


def start_workers(
    options: LLMOptions, model: Path, dtype: DType, config: ModelConfig, kernels: Kernels | None
) -> Workers:
    """Start the processes of a model, or join those that ``torchrun`` has started.

    ``model`` is the checkpoint, and ``dtype`` that of the weights, as the options of these names
    select them.

    Raises:
        OptionError: ``workers`` is above 1 without compiled kernels (with torch, a row's bits
            depend on the batch), without torch (whose processes exchange messages), or for a model
            with recurrent layers or latent attention; too large for tensor parallelism; or not the
            number of processes that ``torchrun`` launched.
    """
    workers = options.workers
    if workers == 1:
        return SingleProcess(config)
    if kernels is None:
        msg = (
            f"workers: expected 1 without the compiled kernels, found {workers}; install the "
            "kernels or set 1"
        )
        raise OptionError(msg)
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
