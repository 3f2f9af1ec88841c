"""Description of the machine of a benchmark, and its measured memory bandwidth and peak memory."""

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

__all__ = ["BandwidthMeter", "PeakMemory", "hardware", "versions"]

_PACKAGES = ("pronk", "torch", "tokenizers", "safetensors", "numpy")

# 1 GiB: larger than the caches of today's processors.
_BUFFER_BYTES = 2**30


class BandwidthMeter:
    """Measures the read bandwidth of memory by a parallel sum over a buffer larger than the caches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.zeros(_BUFFER_BYTES // 4, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._buffer.nbytes

    def measure(self) -> float:
        """Return the read bandwidth in bytes per second, the best of three runs."""
        best = 0.0
        for _ in range(3):
            began = perf_counter()
            self._buffer.sum()
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            best = max(best, self._buffer.nbytes / (perf_counter() - began))
        return best


class PeakMemory:
    """Peak memory of this process, or of its accelerator, since :meth:`reset`.

    Args:
        device: device of the model.
        besides: bytes of the benchmark's own buffers, which are subtracted.
    """

    def __init__(self, device: torch.device, besides: int = 0) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._besides = besides

    def reset(self) -> None:
        """Reset the peak to the current memory, if the system supports it."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        else:
            reset_peak_memory()

    def read(self) -> int | None:
        """Return the peak in bytes, or ``None`` if the system does not report it."""
        peak = peak_memory() if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)
        return None if peak is None else peak - self._besides


def hardware(device: torch.device) -> dict[str, Any]:
    """Return a description of processor, available cores, bytes of memory, threads and device."""
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
    """Return the versions of Python and of the packages that are installed."""
    installed = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
