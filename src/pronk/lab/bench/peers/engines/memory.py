"""Peak memory of a process."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


def reset_peak_memory(process: int | str = "self") -> None:
    """Reset the peak of a process, given by its id, to its memory now, if the system can."""
    with contextlib.suppress(OSError):
        # 5 sets the process's peak to its current resident size (proc(5), clear_refs).
        Path(f"/proc/{process}/clear_refs").write_text("5", encoding="ascii")


def peak_memory(process: int | str = "self") -> int | None:
    """Return the peak of a process in bytes, or ``None`` if the system does not report it."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return None if peak is None else 1024 * int(peak[1])
