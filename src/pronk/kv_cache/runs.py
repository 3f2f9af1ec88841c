"""Set of numbers, stored as runs of consecutive numbers that are indexed by start and by length.

::

    numbers     0 1 2 . . 5 6 . 8          runs (0, 3), (5, 7), (8, 9)
    by start    0, 5, 8
    by length   (1, 8), (2, 5), (3, 0)

The lists by start and by length are sorted, so that a run is found by binary search.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

__all__ = ["FreeRuns", "to_runs"]


class FreeRuns:
    """Subset of the numbers ``0 .. stop - 1``, stored as runs; initially all of them."""

    def __init__(self, stop: int) -> None:
        self._starts: list[int] = []  # start of each run, ascending
        self._stops: dict[int, int] = {}  # end (exclusive) of each run, by its start
        self._lengths: list[tuple[int, int]] = []  # (length, start) of each run, ascending
        if stop:
            self._insert(0, stop)

    def __iter__(self) -> Iterator[int]:
        return (number for start in self._starts for number in range(start, self._stops[start]))

    def __contains__(self, number: int) -> bool:
        start = self._last_start(number)
        return start is not None and number < self._stops[start]

    def best_fit(self, length: int) -> range:
        """Return the shortest run of at least ``length`` numbers, or the longest run if all are shorter."""
        index = bisect_left(self._lengths, (length, 0))
        if index == len(self._lengths):
            index = bisect_left(self._lengths, (self._lengths[-1][0], 0))
        run_length, start = self._lengths[index]
        return range(start, start + run_length)

    def run_from(self, number: int) -> range:
        """Return ``number`` and all numbers after it in its run; empty if ``number`` is not in the set."""
        start = self._last_start(number)
        return range(number, number if start is None else max(number, self._stops[start]))

    def add(self, run: range) -> None:
        """Add a run of numbers, none of which is in the set, and merge it with adjacent runs."""
        start, stop = run.start, run.stop
        before = self._last_start(start)
        if before is not None and self._stops[before] == start:
            self._remove(before)
            start = before
        if stop in self._stops:
            stop = self._remove(stop)
        self._insert(start, stop)

    def take(self, run: range) -> None:
        """Remove a run of numbers, all of which are in the set."""
        start = self._last_start(run.start)
        assert start is not None
        stop = self._remove(start)
        assert run.stop <= stop
        if start < run.start:
            self._insert(start, run.start)
        if run.stop < stop:
            self._insert(run.stop, stop)

    def _last_start(self, number: int) -> int | None:
        """Return the start of the last run that begins at or before ``number``; ``None`` if none does."""
        index = bisect_right(self._starts, number)
        return self._starts[index - 1] if index else None

    def _insert(self, start: int, stop: int) -> None:
        insort(self._starts, start)
        insort(self._lengths, (stop - start, start))
        self._stops[start] = stop

    def _remove(self, start: int) -> int:
        stop = self._stops.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._lengths[bisect_left(self._lengths, (stop - start, start))]
        return stop


def to_runs(numbers: Iterable[int]) -> list[range]:
    """Group distinct numbers, in any order, into runs of consecutive numbers in ascending order."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
