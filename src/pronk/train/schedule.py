"""Progress of a run and its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Progress and learning rate of a run that ends after ``steps``, or earlier after ``minutes``.

    After the warm-up, the learning rate depends on the progress, not on the step. On a machine of any speed the rate
    is therefore down to ``floor * peak`` when the time is over.
    """

    steps: int
    minutes: float | None
    warmup: int
    peak: float
    floor: float

    def progress(self, step: int, seconds: float) -> float:
        """Return the progress, 0..1: ``max(step / steps, seconds / (60 * minutes))``, at most 1."""
        by_time = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return min(1.0, max(step / self.steps, by_time))

    def rate(self, step: int, progress: float) -> float:
        """Return the learning rate of a step (from 0): linear warm-up, then a cosine to ``floor * peak``."""
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * min(1.0, (step + 1) / (self.warmup + 1)) * (self.floor + (1 - self.floor) * cosine)
