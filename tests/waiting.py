"""Waiting for events, clocks that a test sets, and limits of work.

Tests must hold on a busy machine. A test therefore states an event, an amount of work or a time of
a given clock, but no duration. ``HUNG`` only ends a test that hangs, so it is longer than any
machine needs.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# Seconds after which an event is taken never to come. Tests with a planted fault set fewer, because
# some of them end only then.
HUNG = float(os.environ.get("PRONK_TESTS_HUNG", "300"))


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait until a condition is true; return False if it is still false after ``HUNG`` seconds."""
    end = time.monotonic() + HUNG
    while not (is_true := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return is_true


async def until(condition: Callable[[], bool]) -> None:
    """Wait in an event loop until a condition is true; fail after ``HUNG`` seconds."""
    end = time.monotonic() + HUNG
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


class ShiftedClock:
    """A clock that a test sets forward, so that deadlines pass at a given event."""

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = shift  # seconds

    def __call__(self) -> float:
        return time.perf_counter() + self.shift


class TimeLimits:
    """Time limits of ``asyncio`` that pass when a test says so; a stand-in for ``asyncio.timeout``.

    A short limit could pass on a busy machine before the work begins that it is to end.
    """

    def __init__(self) -> None:
        self._limits: list[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = []

    def __call__(self, seconds: float | None) -> asyncio.Timeout:
        """Return a limit that :meth:`end` ends, whatever ``seconds`` are."""
        limit = asyncio.Timeout(None)
        self._limits.append((asyncio.get_running_loop(), limit))
        return limit

    def end(self) -> None:
        """Let all limits pass, in their event loops."""
        for loop, limit in self._limits:
            loop.call_soon_threadsafe(_pass, limit, loop.time())


def _pass(limit: asyncio.Timeout, now: float) -> None:
    with suppress(RuntimeError):  # its block has ended
        limit.reschedule(now)


@contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Fail if a block needs more than ``seconds`` of processor time.

    The time of this process and of its children that have ended counts; a busy machine hardly
    changes this time. The limit is for native code, whose work a test cannot count otherwise. Set
    it to at least ten times the processor time on an idle machine.
    """
    start = _processor_seconds()
    yield
    assert _processor_seconds() - start < seconds


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
