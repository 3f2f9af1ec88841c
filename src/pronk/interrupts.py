"""Short stretches of work that Ctrl-C must not cut in two."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["interrupted", "interruptible", "uninterrupted"]


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
        if self.installed and not self.depth:
            self.hand_on()

    @property
    def stands(self) -> bool:
        """Whether SIGINT goes to it."""
        return signal.getsignal(signal.SIGINT) is self

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
        if (_guard.installed and _guard.stands) or threading.get_ident() != threading.main_thread().ident:
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            # Until it is installed, and once it is not any longer, the guard keeps what comes.
            _guard.handler, self._mine = (_guard.handler if _guard.stands else handler), True
            signal.signal(signal.SIGINT, _guard)
            _guard.installed = True

    def __exit__(self, *_: object) -> None:
        if self._mine:
            _guard.installed = False
            if _guard.stands:  # or else somebody has put another one there meanwhile
                signal.signal(signal.SIGINT, _guard.handler)
            _guard.hand_on()


def interrupted() -> bool:
    """Whether a SIGINT is being kept: for long work among what must not be cut, which had better end soon."""
    return bool(_guard.caught)


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
