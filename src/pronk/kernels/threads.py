"""How many threads compute.

There is one setting, torch's (``torch.set_num_threads``). The kernels have threads of their own, though, and two sets
of threads on the same cores, each waiting for work without giving its core up, cost a step half as much again. So while
an engine steps, torch's small operations between two passes have one thread, and the kernels those of the setting.
"""

from __future__ import annotations

import threading

import torch

from pronk.checks import check_integer

__all__ = ["lend_threads", "num_threads", "return_threads", "set_threads"]


class _Setting(threading.local):
    """What torch's setting is in this thread, while the kernels have it."""

    lent = False
    count = 0  # 0: it has not been lent yet


_setting = _Setting()
_latest = 0  # in any thread


def set_threads(threads: int | None, workers: int, *, divide: bool = True) -> None:
    """How many threads this process computes with, one of ``workers``.

    Args:
        threads: 1..4096; ``None`` is torch's choice, or a worker's part of it.
        workers: 1..64.
        divide: whether they share what torch would take.

    Raises:
        OptionError: one of them is out of its range.
    """
    check_integer("workers", workers, 1, 64)
    if threads is not None:
        check_integer("threads", threads, 1, 4096)
        torch.set_num_threads(threads)
    elif workers > 1 and divide:
        torch.set_num_threads(max(1, num_threads() // workers))


def num_threads() -> int:
    """How many threads the kernels have."""
    return _setting.count if _setting.lent and torch.get_num_threads() == 1 else torch.get_num_threads()


def lend_threads() -> None:
    """Give the kernels the threads that torch had; torch has one from now on.

    A thread that meets torch while another one has lent its setting begins with one, which nobody asked for; it takes
    the other's setting.
    """
    global _latest  # noqa: PLW0603 - the setting is the process's
    count = num_threads()
    if count == 1 and not _setting.count:
        count = max(1, _latest)
    _setting.count = _latest = count
    _setting.lent = True
    torch.set_num_threads(1)


def return_threads() -> None:
    """Torch's setting is what it was; nothing, if an interruption came before it was lent."""
    if _setting.lent:
        torch.set_num_threads(_setting.count)
        _setting.lent = False
