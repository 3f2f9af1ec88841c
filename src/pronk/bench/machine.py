"""The machine that runs a benchmark: description, memory bandwidth, and peak memory of the methods."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pronk.bench.peers.engines.memory import peak_memory, reset_peak_memory

__all__ = ["BandwidthMeter", "PeakMemory", "describe_hardware", "versions"]

_PACKAGES = ("pronk", "torch", "tokenizers", "safetensors", "numpy")

_BUFFER_BYTES = 2**30  # larger than the caches of today's processors


class BandwidthMeter:
    """Measures the read bandwidth of memory by a parallel sum over a buffer larger than the caches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.zeros(_BUFFER_BYTES // 4, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the buffer that :meth:`measure` reads."""
        return self._buffer.nbytes

    def measure(self) -> float:
        """Return the read bandwidth in bytes per second, the best of three runs."""
        best = 0.0
        for _ in range(3):
            started = perf_counter()
            self._buffer.sum()
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            best = max(best, self._buffer.nbytes / (perf_counter() - started))
        return best


class PeakMemory:
    """Peak memory since :meth:`reset`: on CUDA of the GPU, otherwise of this process.

    Args:
        device: device of the model.
        excluded_bytes: bytes of the benchmark's own buffers, which are subtracted.
    """

    def __init__(self, device: torch.device, excluded_bytes: int = 0) -> None:
        self._cuda_device = device if device.type == "cuda" else None
        self._excluded_bytes = excluded_bytes

    def reset(self) -> None:
        """Set the peak to the memory in use now, if the system supports it."""
        if self._cuda_device is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda_device)
        else:
            reset_peak_memory()

    def read(self) -> int | None:
        """Return the peak in bytes, or ``None`` if the system does not report it."""
        peak = peak_memory() if self._cuda_device is None else torch.cuda.max_memory_allocated(self._cuda_device)
        return None if peak is None else peak - self._excluded_bytes


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Return the machine's properties by name: processor, cores, bytes of memory, threads, device."""
    description: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
    }
    if device.type == "cuda":
        description["accelerator"] = torch.cuda.get_device_name(device)
    return description


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of those ``packages`` that are installed."""
    installed = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
