"""Description of the machine that runs a benchmark, its memory bandwidth, and peak memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from pronk.backends import Kernels, KernelsError, candidates, machine_memory, num_threads
from pronk.base.arrays import UINT8, mapped_zeros
from pronk.lab.bench.peers.engines.memory import peak_memory, reset_peak_memory

_PACKAGES = ("pronk", "torch", "tokenizers", "safetensors", "numpy")

_BUFFER_BYTES = 2**30  # larger than the caches of today's processors


class BandwidthMeter:
    """Measures the bandwidth of reading memory, with all threads, on a buffer beyond the caches."""

    def __init__(self, kernels: Kernels) -> None:
        self.nbytes = _BUFFER_BYTES
        self._kernels = kernels
        self._buffer = mapped_zeros((_BUFFER_BYTES,), UINT8)
        # the system maps all unwritten pages to one page, which would stay in the processor's cache
        self._buffer.fill(0)

    def measure(self) -> float:
        """Return the read bandwidth in bytes per second, the best of three runs."""
        best = 0.0
        for _ in range(3):
            started = perf_counter()
            self._kernels.read(self._buffer)
            best = max(best, self.nbytes / (perf_counter() - started))
        return best


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
    has_affinity = hasattr(os, "sched_getaffinity")
    description: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "memory": machine_memory(),
        "system": platform.platform(),
        "threads": num_threads(),
        "device": device,
    }
    with suppress(KernelsError):
        description["capability"] = candidates()[0].name
    if device.startswith("cuda"):
        from torch import cuda  # noqa: PLC0415 - torch is optional

        description["accelerator"] = cuda.get_device_name(device)
    return description


def _processor() -> str:
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter for speed."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
