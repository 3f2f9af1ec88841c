"""Time limit of a run, from the start of the command to the finished model.

The limit ``--minutes`` is divided among the phases of a run::

    0 ───── 1/6 ───── 1/3 ──────────────────────────────────── 9/10 ──────── 1
    tokenizing   own text    training and its evaluations       last evaluations

Time that a phase does not use goes to the next ones. Each phase does a minimum even if its time is
over: text for one sequence, one training step, one batch of each evaluation. Reading the sources of
text has no time limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path
from typing import TypeVar

from pronk.base import write_json

# Ends of three phases, as fractions of the time limit: tokenizing, writing the target's own text,
# and training.
TOKENS_BY = 1 / 6
TEXT_BY = 1 / 3
TRAINED_BY = 0.9
EVALUATION = 0.05  # duration of one evaluation during training, as a fraction of the limit

T = TypeVar("T")


class Clock:
    """Measures the duration of a run, from the creation of this object; has the time limit, if any.

    ``minutes`` is the limit.
    """

    def __init__(self, minutes: float | None) -> None:
        self.limit = inf if minutes is None else 60 * minutes  # in seconds
        self.has_limit = minutes is not None
        self.earlier = 0.0  # duration in seconds of the run's parts before it was resumed
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Duration so far in seconds, including the time before the run was resumed."""
        return self.earlier + time.monotonic() - self._began

    def seconds_left(self, share: float = 1.0) -> float:
        """Return the seconds until the fraction ``share`` of the time limit has passed.

        The result is negative after that, and infinite without a limit.
        """
        return share * self.limit - self.seconds

    def save(self, folder: Path) -> None:
        """Write the duration so far to ``folder``, for a run that has no checkpoint yet.

        Before the training, no checkpoint can store the duration.
        """
        write_json(folder / "clock.json", {"seconds": self.seconds})

    def restore(self, folder: Path) -> None:
        """Add the duration that :meth:`save` wrote to ``folder``, if any, to this one."""
        file = folder / "clock.json"
        if file.exists():
            self.earlier = json.loads(file.read_text(encoding="utf-8"))["seconds"]


def limit_time(seconds: float, items: Iterable[T]) -> Iterator[T]:
    """Yield ``items`` until ``seconds`` have passed, but at least the first one."""
    end = time.monotonic() + seconds
    for number, item in enumerate(items):
        if number and time.monotonic() >= end:
            return
        yield item
