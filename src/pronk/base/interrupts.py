"""Deferral of Ctrl-C (SIGINT) during a change of state; end of a process whose parent has ended.

An engine step changes requests, caches and drafter state. An interrupt in the middle of these
changes would corrupt other requests. SIGINT is therefore deferred during a step, except in
:class:`interruptible` blocks around long computations::

    with uninterrupted():
        plan()
        with interruptible():
            compute()
        commit()

If the handler of a SIGINT raises in an ``interruptible`` block, later SIGINTs are deferred until
the outermost ``uninterrupted`` block ends, so that clean-up is not interrupted.
"""

from __future__ import annotations

import os
import signal
import threading
from time import sleep
from types import FrameType
from typing import Any

_WATCH_PERIOD = 0.5  # seconds between two checks whether the parent process is alive


class _Guard:
    """A SIGINT handler that defers signals while ``depth`` is above 0.

    Attributes:
        installed: whether the guard is in use as the SIGINT handler.
        depth: number of nested ``uninterrupted`` blocks; 0 in an ``interruptible`` block.
        outer_depths: ``depth`` before each open ``interruptible`` block, the outermost first.
        deferred: signal number and stack frame of each deferred signal.
        handler: the previous SIGINT handler, which receives the deferred signals.
        thread: identifier of the main thread, which installs the guard and gets the signals; in
            other threads nothing is deferred.
    """

    def __init__(self) -> None:
        self.installed = False
        self.depth = 0
        self.outer_depths: list[int] = []
        self.deferred: list[tuple[int, FrameType | None]] = []
        self.handler: Any = None
        self.thread = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.deferred.append((number, frame))
        if self.installed:
            self.deliver()

    @property
    def is_handler(self) -> bool:
        """Whether the guard is the SIGINT handler now; other code may have set another handler."""
        return signal.getsignal(signal.SIGINT) is self

    def deliver(self) -> None:
        """If ``depth`` is 0, call ``handler`` for the first deferred signal and drop the others.

        While ``handler`` runs in an ``interruptible`` block, and after it has raised there, further
        signals are deferred.
        """
        if self.deferred and not self.depth:
            first = self.deferred[0]
            self.deferred.clear()
            self.depth = self.outer_depths[-1] if self.outer_depths else 0
            self.handler(*first)
            self.depth = 0


_guard = _Guard()


def is_interrupt_pending() -> bool:
    """Return whether a SIGINT is deferred.

    Long work in an ``uninterrupted`` block calls this function, and ends early if it returns True.
    """
    return bool(_guard.deferred)


class uninterrupted:  # noqa: N801 - read as a statement: with uninterrupted(): …
    """Defer SIGINT until the end of the block; no effect outside the main thread."""

    def __enter__(self) -> None:
        self._installed = False  # whether this block has made the guard the SIGINT handler
        # A nested block need not look at the handler: the outermost block has done so.
        is_nested = _guard.depth or _guard.outer_depths
        if not (_guard.installed and (is_nested or _guard.is_handler)):
            self._install()
        self._defers = _guard.installed and threading.get_ident() == _guard.thread
        _guard.depth += self._defers  # adds 1 if True

    def _install(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.get_ident() == threading.main_thread().ident:
            # ``_guard.installed`` is set last. A signal that arrives earlier is stored, and
            # delivered at the end of the block.
            _guard.handler = _guard.handler if _guard.is_handler else handler
            _guard.thread = threading.get_ident()
            self._installed = True
            signal.signal(signal.SIGINT, _guard)
            _guard.installed = True

    def __exit__(self, *_: object) -> None:
        if not self._installed:
            _guard.depth -= self._defers
            if self._defers and _guard.deferred:
                _guard.deliver()
            return
        _guard.installed = False
        _guard.depth -= self._defers
        if _guard.is_handler:  # False if the block has set another handler, which stays
            signal.signal(signal.SIGINT, _guard.handler)
        _guard.deliver()


class interruptible:  # noqa: N801 - read as a statement: with interruptible(): …
    """Deliver SIGINT at once in a part of an ``uninterrupted`` block; no effect elsewhere."""

    def __enter__(self) -> None:
        self._allows = (
            _guard.depth > 0 and _guard.installed and threading.get_ident() == _guard.thread
        )
        if self._allows:
            _guard.outer_depths.append(_guard.depth)
            _guard.depth = 0
            if _guard.deferred:
                try:
                    _guard.deliver()
                except BaseException:
                    self.__exit__()
                    raise

    def __exit__(self, *_: object) -> None:
        if self._allows:
            _guard.depth = _guard.outer_depths[-1]
            _guard.outer_depths.pop()


def end_with_parent() -> None:
    """End this process soon after its parent, ``torchrun``, even if the parent was killed.

    The other processes that ``torchrun`` has started are not watched: if one of them ends, its
    closed connections make the collective operations fail.
    """
    parent = os.getppid()

    def watch() -> None:
        # A parent number of 1 means that the parent has ended before this call.
        while os.getppid() == parent != 1:
            sleep(_WATCH_PERIOD)
        os._exit(1)

    threading.Thread(target=watch, name="pronk-parent", daemon=True).start()
