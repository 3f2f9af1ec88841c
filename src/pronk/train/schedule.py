"""How far a run is, and the learning rate there."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """A run ends after ``steps``, or after ``minutes`` on the clock if that comes first.

    The learning rate follows the progress, not the step, so that it has come down when the time is up, however
    fast the machine was and however often the process had to wait.
    """

    steps: int
    minutes: float | None
    warmup: int
    peak: float
    floor: float

    def progress(self, step: int, seconds: float) -> float:
        """Finished share of the run, 0 to 1, by steps or by time, whichever is further."""
        by_time = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return min(1.0, max(step / self.steps, by_time))

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of step ``step`` (from 0): linear warm-up, then a cosine from ``peak`` to ``floor * peak``."""
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * min(1.0, (step + 1) / (self.warmup + 1)) * (self.floor + (1 - self.floor) * cosine)
