"""Number of threads that torch and the kernels compute with.

The only setting is torch's (``torch.set_num_threads``). The kernels have a thread pool of their own, and two pools that
spin on the same cores increase the time of a step by half. So during an engine step the kernels use the threads of the
setting, and torch, which runs small operations only, uses one thread.
"""

from __future__ import annotations

import threading

import torch

from pronk.checks import check_integer

__all__ = ["lend_threads", "num_threads", "return_threads", "set_threads"]


class _Setting(threading.local):
    """Torch's setting in this Python thread while the kernels use it."""

    lent = False
    count = 0  # 0: not lent yet


_setting = _Setting()
_latest = 0  # latest count that any Python thread lent


def set_threads(threads: int | None, workers: int, *, divide: bool = True) -> None:
    """Set the number of threads of this process, which is one of ``workers`` processes.

    Args:
        threads: 1..4096; ``None`` is torch's default, divided by the workers.
        workers: 1..64.
        divide: divide torch's default among the workers.

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
    """Return the number of threads of the kernels."""
    return _setting.count if _setting.lent and torch.get_num_threads() == 1 else torch.get_num_threads()


def lend_threads() -> None:
    """Give torch's threads to the kernels and set torch to one thread.

    A Python thread that starts while another one has lent its setting finds torch at one thread; it takes the other's
    setting instead.
    """
    global _latest  # noqa: PLW0603 - the setting is the process's
    count = num_threads()
    if count == 1 and not _setting.count:
        count = max(1, _latest)
    _setting.count = _latest = count
    _setting.lent = True
    torch.set_num_threads(1)


def return_threads() -> None:
    """Restore torch's setting; do nothing if an interrupt came before it was lent."""
    if _setting.lent:
        torch.set_num_threads(_setting.count)
        _setting.lent = False
