"""Number of threads that torch and the kernels compute with.

The only setting is torch's (``torch.set_num_threads``). Torch and the kernels each have a thread pool, and two pools
that spin on the same cores increase the time of an engine step by half. So during a step the kernels use the set number
of threads, and torch, which runs small operations only, uses one thread.
"""

from __future__ import annotations

import threading

import torch

from pronk.checks import check_integer

__all__ = ["dedicate_threads", "num_threads", "restore_threads", "set_threads"]


class _SavedSetting(threading.local):
    """Torch's setting in this Python thread, saved while torch is set to one thread."""

    active = False  # torch is set to one thread
    count = 0  # number of threads; 0: never saved


_saved = _SavedSetting()
_latest_count = 0  # latest count that any Python thread saved


def set_threads(threads: int | None, workers: int, *, divide: bool = True) -> None:
    """Set the number of threads of this process, which is one of ``workers`` processes.

    Args:
        threads: number of threads, 1..4096; ``None`` is torch's default.
        workers: number of processes that share the machine, 1..64.
        divide: divide torch's default by ``workers``.

    Raises:
        OptionError: a number is out of its range.
    """
    check_integer("workers", workers, 1, 64)
    if threads is not None:
        check_integer("threads", threads, 1, 4096)
        torch.set_num_threads(threads)
    elif workers > 1 and divide:
        torch.set_num_threads(max(1, num_threads() // workers))


def num_threads() -> int:
    """Return the kernels' number of threads: torch's setting, or the saved one if torch has one thread."""
    return _saved.count if _saved.active and torch.get_num_threads() == 1 else torch.get_num_threads()


def dedicate_threads() -> None:
    """Save torch's setting for the kernels and set torch to one thread.

    A Python thread that starts while torch is set to one thread uses the latest count that another Python thread saved.
    """
    global _latest_count  # noqa: PLW0603 - the setting is the process's
    count = num_threads()
    if count == 1 and not _saved.count:
        count = max(1, _latest_count)
    _saved.count = _latest_count = count
    _saved.active = True
    torch.set_num_threads(1)


def restore_threads() -> None:
    """Restore torch's setting; do nothing if an interrupt came before it was saved."""
    if _saved.active:
        torch.set_num_threads(_saved.count)
        _saved.active = False
