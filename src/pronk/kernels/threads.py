"""Division of the CPU threads between torch and the kernels.

``torch.set_num_threads`` is the only setting. Torch and the kernels each have a thread pool, and idle threads of one
pool spin on the cores that the other pool needs: with two active pools, an engine step takes 1.5 times as long. During
a step, the kernels therefore use the set number of threads, and torch, which runs only small operations, uses one.
"""

from __future__ import annotations

import threading

import torch

from pronk.checks import check_integer

__all__ = ["dedicate_threads", "num_threads", "restore_threads", "set_threads"]


class _SavedSetting(threading.local):
    """Torch's number of threads in this Python thread before :func:`dedicate_threads` set it to one."""

    active = False  # whether torch is set to one thread
    count = 0  # saved number of threads; 0 before the first save


_saved = _SavedSetting()
_latest_count = 0  # last ``count`` saved in any Python thread; 0 before the first save


def set_threads(threads: int | None, workers: int, *, divide: bool = True) -> None:
    """Set torch's number of threads in this process.

    Args:
        threads: number of threads, 1..4096; ``None`` keeps or divides the current number, see ``divide``.
        workers: number of processes that compute on this machine, 1..64.
        divide: whether ``None`` as ``threads`` divides the current number by ``workers``.

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
    """Return the kernels' number of threads: torch's, or the saved number while torch is limited to 1."""
    return _saved.count if _saved.active and torch.get_num_threads() == 1 else torch.get_num_threads()


def dedicate_threads() -> None:
    """Save torch's number of threads for the kernels, and set torch to one thread.

    If a new Python thread finds torch set to one thread already, it saves the number that another thread saved last.
    """
    global _latest_count  # noqa: PLW0603 - the setting is the process's
    count = num_threads()
    if count == 1 and not _saved.count:
        count = max(1, _latest_count)
    _saved.count = _latest_count = count
    _saved.active = True
    torch.set_num_threads(1)


def restore_threads() -> None:
    """Restore torch's number of threads if :func:`dedicate_threads` has saved it."""
    if _saved.active:
        torch.set_num_threads(_saved.count)
        _saved.active = False
