"""The time that a run has, from the start of its command to the finished model.

``--minutes`` are shared out so that every part of a run ends in time::

    0 ───── 1/6 ───── 1/3 ──────────────────────────────────── 9/10 ──────── 1
    tokenizing   own text    training, with evaluations as it goes    the last evaluations

A part that needs less leaves the rest to those behind it. Each makes at least its smallest piece: text for one
sequence, one step, one batch of each evaluation. Only reading the sources cannot be cut short.
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

# Shares of the time: by when the text is tokenized, the target's own is written, and the training ends; and what one
# evaluation during the training may take.
TOKENS_BY, TEXT_BY, TRAINED_BY = 1 / 6, 1 / 3, 0.9
EVALUATION = 0.05

T = TypeVar("T")


class Clock:
    """How long a run has taken, over all its parts, and how long it may take.

    Attributes:
        limit: in seconds; infinite if there is none.

    Args:
        minutes: that the run may take, from now on; ``None`` for as long as it likes.
    """

    def __init__(self, minutes: float | None) -> None:
        self.limit = inf if minutes is None else 60 * minutes
        self._began, self._earlier = time.monotonic(), 0.0

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self.limit < inf

    @property
    def seconds(self) -> float:
        """Time so far, with that of earlier parts."""
        return self._earlier + time.monotonic() - self._began

    def left(self, share: float = 1.0) -> float:
        """Seconds until that share of the time is over, or since then, if negative."""
        return share * self.limit - self.seconds

    def resume(self, seconds: float) -> None:
        """Count from what earlier parts of the run have taken."""
        self._earlier = seconds

    def save(self, folder: Path) -> None:
        """Write the time so far into ``folder``, for the part of the run before its first checkpoint.

        Raises:
            CheckpointError: it cannot be written.
        """
        write_json(folder / "clock.json", {"seconds": self.seconds})

    def restore(self, folder: Path) -> None:
        """Count from what :meth:`save` wrote, if it did."""
        file = folder / "clock.json"
        if file.exists():
            self.resume(json.loads(file.read_text(encoding="utf-8"))["seconds"])


def within(seconds: float, items: Iterable[T]) -> Iterator[T]:
    """The first of ``items``, and as many as are asked for in time."""
    end = time.monotonic() + seconds
    for number, item in enumerate(items):
        if number and time.monotonic() >= end:
            return
        yield item
