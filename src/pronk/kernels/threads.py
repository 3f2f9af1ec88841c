"""How many threads compute.

There is one setting, torch's (``torch.set_num_threads``). The kernels have threads of their own, though, and two sets
of threads on the same cores, each waiting for work without giving its core up, cost a step half as much again. So while
an engine steps, torch's small operations between two passes have one thread, and the kernels those of the setting.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["lend_threads", "num_threads", "return_threads"]


class _Setting(threading.local):
    """What torch's setting is in this thread, while the kernels have it."""

    lent = False
    count = 0  # 0: it has not been lent yet


_setting = _Setting()
_latest = 0  # in any thread


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
