"""Peak memory of this process."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


def reset_peak_memory() -> None:
    """Reset the peak to the current memory, if the system supports it."""
    with contextlib.suppress(OSError):
        # 5 sets the process's peak to its current resident size (proc(5), clear_refs).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> int | None:
    """Return the peak in bytes, or ``None`` if the system does not report it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return None if peak is None else 1024 * int(peak[1])
