"""Time limit of a run, from the start of the command to the finished model.

``--minutes`` are divided so that every part of a run ends in time::

    0 ───── 1/6 ───── 1/3 ──────────────────────────────────── 9/10 ──────── 1
    tokenizing   own text    training, with evaluations as it goes    the last evaluations

Unused time goes to the next parts. Each part does its minimum even if the time is over: text for one sequence, one
step, one batch of each evaluation. Reading the sources is not cut short.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path
from typing import TypeVar

from pronk.files.atomic import write_json

__all__ = ["EVALUATION", "TEXT_BY", "TOKENS_BY", "TRAINED_BY", "Clock", "within"]

# Shares of the time: ends of tokenizing, of the target's own text and of training; one evaluation during training.
TOKENS_BY, TEXT_BY, TRAINED_BY = 1 / 6, 1 / 3, 0.9
EVALUATION = 0.05

T = TypeVar("T")


class Clock:
    """The duration of a run over all its parts, and its limit.

    ``limit`` is in seconds, infinite without ``minutes``, which count from now on.
    """

    def __init__(self, minutes: float | None) -> None:
        self.limit = inf if minutes is None else 60 * minutes
        self._began, self._earlier = time.monotonic(), 0.0

    @property
    def limited(self) -> bool:
        """Whether the run has a limit."""
        return self.limit < inf

    @property
    def seconds(self) -> float:
        """Seconds so far, with those of earlier parts."""
        return self._earlier + time.monotonic() - self._began

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until ``share`` of the limit; negative after that."""
        return share * self.limit - self.seconds

    def resume(self, seconds: float) -> None:
        """Set the duration of the earlier parts of the run."""
        self._earlier = seconds

    def save(self, folder: Path) -> None:
        """Write the seconds so far into ``folder``, for the time before the first checkpoint."""
        write_json(folder / "clock.json", {"seconds": self.seconds})

    def restore(self, folder: Path) -> None:
        """Resume from the file of :meth:`save`, if there is one."""
        file = folder / "clock.json"
        if file.exists():
            self.resume(json.loads(file.read_text(encoding="utf-8"))["seconds"])


def within(seconds: float, items: Iterable[T]) -> Iterator[T]:
    """Yield the first of ``items``, and more until ``seconds`` have passed."""
    end = time.monotonic() + seconds
    for number, item in enumerate(items):
        if number and time.monotonic() >= end:
            return
        yield item
