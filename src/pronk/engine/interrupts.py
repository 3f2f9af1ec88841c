"""Short stretches of work that Ctrl-C must not cut in two."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["interruptible", "uninterrupted"]


class _Guard:
    """A handler of SIGINT that keeps what comes while ``depth`` is above 0.

    Attributes:
        installed: whether it stands in place of ``handler``.
        depth: stretches that must not be cut, one within the other.
        caught: what came during them.
    """

    def __init__(self) -> None:
        self.installed = False
        self.depth = 0
        self.caught: list[tuple[int, FrameType | None]] = []
        self.handler: Any = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.caught.append((number, frame))
        if not self.depth:
            self.hand_on()

    def hand_on(self) -> None:
        """What has been kept goes to the handler that was there before."""
        if self.caught:
            first = self.caught[0]
            self.caught.clear()
            self.handler(*first)


_guard = _Guard()


class interruptible:  # noqa: N801 - read as a statement: with interruptible(): …
    """Around several :class:`uninterrupted` stretches: the handler is put in place once, and between them it hands on.

    Python delivers the signal to the main thread only, so elsewhere there is nothing to do.
    """

    def __enter__(self) -> None:
        self._mine = False
        if _guard.installed or threading.get_ident() != threading.main_thread().ident:
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            _guard.handler, self._mine = handler, True
            signal.signal(signal.SIGINT, _guard)
            _guard.installed = True

    def __exit__(self, *_: object) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, _guard.handler)
            _guard.installed = False
            _guard.hand_on()


class uninterrupted:  # noqa: N801 - as above
    """Keep SIGINT until the block is through, then hand it on.

    For the milliseconds in which requests change; half a change would ruin requests that nobody interrupted.
    """

    def __enter__(self) -> None:
        self._outer = None
        if not _guard.installed:
            self._outer = interruptible()
            self._outer.__enter__()
        self._masks = _guard.installed and threading.get_ident() == threading.main_thread().ident
        _guard.depth += self._masks

    def __exit__(self, *_: object) -> None:
        _guard.depth -= self._masks
        if self._outer is not None:
            self._outer.__exit__()
        elif self._masks and not _guard.depth:
            _guard.hand_on()
