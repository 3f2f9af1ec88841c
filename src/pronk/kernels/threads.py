"""How many threads compute.

There is one setting, torch's (``torch.set_num_threads``). The kernels have threads of their own, though, and two sets
of threads on the same cores, each waiting for work without giving its core up, cost a step half as much again. So while
an engine steps, the setting is the kernels', and torch's small operations between two passes have one thread.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["num_threads", "ours"]


class _Held(threading.local):
    count = 0  # of the kernels, while this thread steps


_held = _Held()


def num_threads() -> int:
    """How many threads the kernels have."""
    return _held.count or torch.get_num_threads()


class ours:  # noqa: N801 - read as a statement: with ours(): …
    """The threads are the kernels' alone."""

    def __enter__(self) -> None:
        self._before = _held.count
        _held.count = num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(_held.count)
        _held.count = self._before
