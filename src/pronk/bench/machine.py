"""The machine that a benchmark runs on: what it is, how fast it reads memory, how much of it a process takes."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

__all__ = ["BandwidthMeter", "PeakMemory", "hardware", "versions"]

# Larger than the caches of the processors that this is for.
_BUFFER_BYTES = 2**30

_PACKAGES = ("pronk", "torch", "tokenizers", "safetensors", "numpy")


class BandwidthMeter:
    """Measures how fast the device reads memory: a parallel reading sum over a buffer that no cache holds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.zeros(_BUFFER_BYTES // 4, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Memory that the buffer takes."""
        return self._buffer.nbytes

    def measure(self) -> float:
        """Bytes per second, best of three."""
        best = 0.0
        for _ in range(3):
            began = perf_counter()
            self._buffer.sum()
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            best = max(best, self._buffer.nbytes / (perf_counter() - began))
        return best


class PeakMemory:
    """The most memory that this process, or its accelerator, had in use since :meth:`reset`.

    ``besides`` are bytes that do not count: buffers of the benchmark itself.
    """

    def __init__(self, device: torch.device, besides: int = 0) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._besides = besides

    def reset(self) -> None:
        """Forget earlier peaks, where the system can."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return
        try:
            # 5 sets the process's peak to what it has resident now (proc(5), clear_refs).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return

    def read(self) -> int | None:
        """Bytes, or ``None`` where the system does not tell."""
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda) - self._besides
        try:
            status = Path("/proc/self/status").read_text(encoding="ascii")
        except OSError:
            return None
        peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peaks[0]) * 1024 - self._besides if peaks else None


def hardware(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "device": str(device),
    }
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of what computes."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
