"""Estimates of the duration of a command, from the time that its first parts take."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORT_SECONDS = 10.0  # a shorter command is not announced
_MINUTE = 60
_HOUR = 3600


class TimeEstimate:
    """Says once how long a piece of work takes, and how it becomes shorter.

    Args:
        say: function that prints a line.
        work: noun phrase for all of the work, such as "8 prompts × 2 methods".
        shorter: the options that make it shorter, such as "--limit 1".
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        work: str,
        shorter: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._work = work
        self._shorter = shorter
        self._clock = clock
        # work done before the first timed part, and its time
        self._start: tuple[float, float] | None = None
        self._is_done = False

    def update(self, done: float, total: float) -> None:
        """Note the amount of work done so far and in all.

        Announce the duration after the first timed part.
        """
        if self._is_done:
            return
        now = self._clock()
        # preparations before the first part do not count
        if self._start is None or done <= self._start[0]:
            self._start = (done, now)
            return
        first, began = self._start
        seconds = (now - began) / (done - first) * (total - first)
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
