"""Work that Ctrl-C must not cut in two.

A step changes requests, caches and what drafters remember; half a change would ruin requests that nobody interrupted.
So it is ``uninterrupted`` but for windows, in which what takes long is ``interruptible``::

    with uninterrupted():
        plan()
        with interruptible():
            compute()
        settle()

A SIGINT that comes in a window strikes there, and closes it: on the way out nothing more strikes.
"""

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
        windows: the depths around the windows that are open, one within the other.
        caught: what came where it must not strike.
    """

    def __init__(self) -> None:
        self.installed = False
        self.depth = 0
        self.windows: list[int] = []
        self.caught: list[tuple[int, FrameType | None]] = []
        self.handler: Any = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.caught.append((number, frame))
        if self.installed:
            self.strike()

    @property
    def masks(self) -> bool:
        """Whether it is installed, and this is the thread that Python delivers signals to."""
        return self.installed and threading.get_ident() == threading.main_thread().ident

    @property
    def stands(self) -> bool:
        """Whether SIGINT goes to it."""
        return signal.getsignal(signal.SIGINT) is self

    def strike(self) -> None:
        """What has been kept goes to the handler that was there before, if nothing is being guarded.

        What the handler raises leaves the window closed.
        """
        if self.caught and not self.depth:
            first = self.caught[0]
            self.caught.clear()
            self.depth = self.windows[-1] if self.windows else 0
            self.handler(*first)
            self.depth = 0


_guard = _Guard()


def interrupted() -> bool:
    """Whether a SIGINT is being kept: for long work among what must not be cut, which had better end soon."""
    return bool(_guard.caught)


class uninterrupted:  # noqa: N801 - read as a statement: with uninterrupted(): …
    """Keep SIGINT until the block is through, then hand it on.

    Python delivers the signal to the main thread only, so elsewhere there is nothing to do.
    """

    def __enter__(self) -> None:
        self._mine = False
        if not (_guard.installed and _guard.stands):
            self._install()
        self._masks = _guard.masks
        _guard.depth += self._masks

    def _install(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.get_ident() == threading.main_thread().ident:
            # Until it is installed, and once it is not any longer, the guard keeps what comes.
            _guard.handler, self._mine = (_guard.handler if _guard.stands else handler), True
            signal.signal(signal.SIGINT, _guard)
            _guard.installed = True

    def __exit__(self, *_: object) -> None:
        if not self._mine:
            _guard.depth -= self._masks
            if self._masks:
                _guard.strike()
            return
        _guard.installed = False
        _guard.depth -= self._masks
        if _guard.stands:  # or else somebody has put another one there meanwhile
            signal.signal(signal.SIGINT, _guard.handler)
        _guard.strike()


class interruptible:  # noqa: N801 - as above
    """A window among what is uninterrupted; elsewhere it changes nothing."""

    def __enter__(self) -> None:
        self._opens = _guard.masks and _guard.depth > 0
        if self._opens:
            _guard.windows.append(_guard.depth)
            _guard.depth = 0
            try:
                _guard.strike()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        if self._opens:
            _guard.depth = _guard.windows[-1]
            _guard.windows.pop()
