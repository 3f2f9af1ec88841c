"""Estimate of a command's duration from the time of its first part, announced to the user."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORT_SECONDS = 10.0  # a shorter command is not announced
_MINUTE = 60
_HOUR = 3600


class TimeEstimate:
    """Announcement of a command's duration, and of the options that shorten the command.

    The line is printed once, after the first part of the work, and only for a duration of at least
    10 seconds.

    Args:
        say: function that prints a line.
        work: noun phrase for all of the work, such as "8 prompts × 2 methods".
        shorter: the options that shorten the command, such as "--limit 1".
        clock: function that returns the time in seconds.
        first_part: least amount of work from which the duration is estimated, in the unit of
            :meth:`update`. It is several units where units in turn differ, such as the methods of a
            benchmark.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        work: str,
        shorter: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        first_part: float = 0.0,
    ) -> None:
        self._say = say
        self._work = work
        self._shorter = shorter
        self._clock = clock
        self._first_part = first_part
        # Amount of work done at the start of the timed part, and the time of the start.
        self._start: tuple[float, float] | None = None
        self._is_done = False

    def update(self, done: float, total: float) -> None:
        """Record the progress of the work, and announce the duration when it can be estimated.

        Args:
            done: amount of work done so far, in any unit. The first call only starts the clock, so
                that preparations do not count.
            total: amount of work in all, in the same unit.
        """
        if self._is_done:
            return
        now = self._clock()
        if self._start is None or done <= self._start[0]:
            self._start = (done, now)
            return
        first, start_time = self._start
        if done - first < self._first_part:
            return
        seconds = (now - start_time) / (done - first) * (total - first)
        self._is_done = True
        if seconds >= _SHORT_SECONDS:
            self._say(f"about {duration_text(seconds)} ({self._work}); shorter: {self._shorter}")


def duration_text(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, such as "40 seconds" or "3 hours"."""
    if seconds < 1.5 * _MINUTE:
        return f"{seconds:.0f} seconds"
    if seconds < 1.5 * _HOUR:
        return f"{seconds / _MINUTE:.0f} minutes"
    return f"{seconds / _HOUR:.0f} hours"
