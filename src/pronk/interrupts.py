"""Deferral of Ctrl-C during state changes.

A step changes requests, caches and drafter state; stopping halfway would corrupt other requests. SIGINT is therefore
deferred, except in windows around long computations::

    with uninterrupted():
        plan()
        with interruptible():
            compute()
        commit()

A SIGINT in a window is handled there and closes the window: later ones are deferred until the outer block ends.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["interrupted", "interruptible", "uninterrupted"]


class _Guard:
    """A SIGINT handler that defers signals while ``depth`` is above 0.

    Attributes:
        installed: whether the guard replaces ``handler``.
        depth: nesting depth of uninterrupted blocks.
        windows: saved depths of the enclosing blocks of open windows.
        caught: deferred signals.
        handler: previous handler of SIGINT.
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
        """Whether the guard is installed and this is the main thread, which receives signals."""
        return self.installed and threading.get_ident() == threading.main_thread().ident

    @property
    def stands(self) -> bool:
        """Whether the guard is the current SIGINT handler."""
        return signal.getsignal(signal.SIGINT) is self

    def strike(self) -> None:
        """Pass a deferred signal to the previous handler unless signals are deferred.

        If the handler raises, the window stays closed.
        """
        if self.caught and not self.depth:
            first = self.caught[0]
            self.caught.clear()
            self.depth = self.windows[-1] if self.windows else 0
            self.handler(*first)
            self.depth = 0


_guard = _Guard()


def interrupted() -> bool:
    """Return whether a SIGINT is deferred, so that long uninterrupted work can end early."""
    return bool(_guard.caught)


class uninterrupted:  # noqa: N801 - read as a statement: with uninterrupted(): …
    """Defer SIGINT until the end of the block; no effect outside the main thread."""

    def __enter__(self) -> None:
        self._installed = False
        if not (_guard.installed and _guard.stands):
            self._install()
        self._masks = _guard.masks
        _guard.depth += self._masks

    def _install(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.get_ident() == threading.main_thread().ident:
            # A signal between these statements is deferred, as `installed` is set last.
            _guard.handler, self._installed = (_guard.handler if _guard.stands else handler), True
            signal.signal(signal.SIGINT, _guard)
            _guard.installed = True

    def __exit__(self, *_: object) -> None:
        if not self._installed:
            _guard.depth -= self._masks
            if self._masks:
                _guard.strike()
            return
        _guard.installed = False
        _guard.depth -= self._masks
        if _guard.stands:  # the block may have installed another handler
            signal.signal(signal.SIGINT, _guard.handler)
        _guard.strike()


class interruptible:  # noqa: N801 - as above
    """Allow SIGINT in a part of an uninterrupted block; no effect elsewhere."""

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
