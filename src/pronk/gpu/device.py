"""The device of the option ``device="cuda"``: one NVIDIA GPU computes the target.

The machine keeps the target packed for its processor as well: drafters' modules compute with parts
of it, such as its LM head.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from pronk import OptionError
from pronk.backends import Decoder, Kernels, LLMOptions, ModelConfig, ModelRunner, PagedCache
from pronk.base.arrays import DType
from pronk.gpu.model import check_supported, load_model
from pronk.gpu.pool import GpuPool
from pronk.gpu.runner import GpuRunner


def open_gpu(
    options: LLMOptions, model: Path, dtype: DType, config: ModelConfig, kernels: Kernels
) -> GpuDevice:
    """Open the device of the option ``device``; see :mod:`pronk.engine.workers`.

    Raises:
        OptionError: there is no such device, or it does not compute this model or option.
    """
    del dtype  # that of the pool, in which the device computes, may be wider
    device = find_gpu(options.device)
    check_supported(config, options.device)
    _check_options(options)
    return GpuDevice(options, model, config, kernels, device)


def find_gpu(name: str) -> torch.device:
    """Return the GPU of the name ``cuda`` or ``cuda:0``: the first one.

    Raises:
        OptionError: torch finds no GPU, or the name is that of another one. Kernels are launched
            on the current device of CUDA, which is the first one.
    """
    if torch.cuda.device_count() == 0:
        msg = f"device: expected an NVIDIA GPU for {name!r}, found none; use device='cpu'"
        raise OptionError(msg)
    if name not in ("cuda", "cuda:0"):
        msg = f"device: expected 'cuda', found {name!r}; choose a GPU by CUDA_VISIBLE_DEVICES"
        raise OptionError(msg)
    return torch.device("cuda", 0)


def _check_options(options: LLMOptions) -> None:
    """Raise an OptionError for an option that needs the CPU."""
    needs_cpu = {
        "adapters": bool(options.adapters),
        "workers": options.workers > 1,
        "kv_dtype": options.kv_dtype != "auto",
        "prompt_cache": options.prompt_cache is not None,
    }
    for name, is_set in needs_cpu.items():
        if is_set:
            msg = (
                f"{name}: expected the default with device={options.device!r}, found "
                f"{getattr(options, name)!r}; leave the option out, or use device='cpu'"
            )
            raise OptionError(msg)


class GpuDevice:
    """A :class:`~pronk.engine.workers.Workers` of one GPU."""

    split = None

    def __init__(
        self,
        options: LLMOptions,
        model: Path,
        config: ModelConfig,
        kernels: Kernels,
        device: torch.device,
    ) -> None:
        self.shard_config = config
        self.pool = partial(GpuPool, device=device)
        self._options = options
        self._model = model
        self._kernels = kernels
        self._device = device

    @property
    def memory(self) -> int | None:
        """Free bytes of the GPU; ``None`` for the CPU, on which tests run."""
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else None

    def make_runner(self, decoder: Decoder, cache: PagedCache) -> ModelRunner:
        """Copy the target's weights to the device, and return its runner."""
        assert isinstance(cache, GpuPool), "expected the pool of this device"
        on_device = load_model(self._model, cache, self._kernels, self._options.weights)
        return GpuRunner(decoder, on_device)

    def end(self) -> None:
        """Do nothing: the memory is freed with the runner."""
