"""The machine that a benchmark runs on: what it is, how fast it reads memory, how much of it a process takes."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pronk.bench.host import host

__all__ = ["BandwidthMeter", "PeakMemory", "hardware"]

# Larger than the caches of the processors that this is for.
_BUFFER_BYTES = 2**30


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
    found: dict[str, Any] = host() | {
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
    }
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    return found
