"""Number of threads on which the kernels compute, one setting for the whole process."""

from __future__ import annotations

import os
from pathlib import Path

from pronk.base.checks import check_integer


def _available_cores() -> int:
    """Return the number of processor cores that this process may use, not of hardware threads."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set[str]()
    for number in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text(encoding="utf-8"))
        except OSError:
            cores.add(str(number))
    return len(cores)


_num_threads = _available_cores()


def set_threads(threads: int | None, workers: int, *, divide: bool = True) -> None:
    """Set the number of threads on which the kernels compute in this process.

    Args:
        threads: number of threads, 1..4096; ``None``: the current number, divided by ``workers`` if
            ``divide`` is set.
        workers: number of processes that compute on this machine, 1..64.
        divide: whether to divide the current number; a given number is never divided.

    Raises:
        OptionError: a number is out of range.
    """
    global _num_threads  # noqa: PLW0603 - the setting is the process's
    check_integer("workers", workers, 1, 64)
    if threads is not None:
        check_integer("threads", threads, 1, 4096)
        _num_threads = threads
    elif workers > 1 and divide:
        _num_threads = max(1, _num_threads // workers)


def num_threads() -> int:
    """Return the kernels' number of threads; by default one per core that this process may use."""
    return _num_threads
