"""Description of the machine that runs a benchmark, and peak memory."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pronk.backends import KernelsError, candidates
from pronk.diagnosis import describe_machine
from pronk.lab.bench.peers.engines.memory import peak_memory, reset_peak_memory

_PACKAGES = ("pronk", "torch", "tokenizers", "safetensors", "numpy")


class PeakMemory:
    """Peak memory since ``reset()``: of the GPU on CUDA, otherwise of this process.

    ``reset`` sets the peak to the memory in use now, if the system supports it. ``excluded_bytes``
    is the size of the benchmark's own buffers, which ``read`` subtracts.
    """

    def __init__(self, device: str, excluded_bytes: int = 0) -> None:
        self.reset: Callable[[], None] = reset_peak_memory
        self._peak: Callable[[], int | None] = peak_memory
        if device.startswith("cuda"):
            from torch import cuda  # noqa: PLC0415 - torch is optional

            self.reset = partial(cuda.reset_peak_memory_stats, device)
            self._peak = partial(cuda.max_memory_allocated, device)
        self._excluded_bytes = excluded_bytes

    def read(self) -> int | None:
        """Return the peak in bytes, or ``None`` if the system does not report it."""
        peak = self._peak()
        return None if peak is None else peak - self._excluded_bytes


def describe_hardware(device: str) -> dict[str, Any]:
    """Return the machine's properties by name: processor, cores, bytes of memory, threads, device.

    ``capability`` is the processor's best instruction set for which there are kernels; it is
    missing without kernels.
    """
    description = describe_machine() | {"device": device}
    with suppress(KernelsError):
        description["capability"] = candidates()[0].name
    if device.startswith("cuda"):
        from torch import cuda  # noqa: PLC0415 - torch is optional

        description["accelerator"] = cuda.get_device_name(device)
    return description


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter for speed."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
