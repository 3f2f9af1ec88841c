"""How far a run is, and the learning rate there."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

__all__ = ["Clock", "Schedule"]

_REMEMBERED = 31  # steps that the typical step time is taken over
_STALL = 4.0  # a step counts for at most this many typical steps


class Clock:
    """Seconds of training, not counting pauses.

    A step that took far longer than its predecessors was suspended: it counts for a few typical steps, so that a
    paused process does not end its schedule early.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        """Count one step."""
        typical = median(self._recent) if self._recent else seconds
        self.seconds += min(seconds, _STALL * typical)
        self._recent.append(seconds)


@dataclass(frozen=True)
class Schedule:
    """A run ends after ``steps``, or after ``minutes`` of training if that comes first."""

    steps: int
    minutes: float | None
    warmup: int
    peak: float
    floor: float

    def progress(self, step: int, clock: Clock) -> float:
        """Finished share of the run, 0 to 1, by steps or by time, whichever is further."""
        by_time = 0.0 if self.minutes is None else clock.seconds / (60 * self.minutes)
        return min(1.0, max(step / self.steps, by_time))

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of step ``step`` (from 0): linear warm-up, then a cosine from ``peak`` to ``floor * peak``."""
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * min(1.0, (step + 1) / (self.warmup + 1)) * (self.floor + (1 - self.floor) * cosine)
