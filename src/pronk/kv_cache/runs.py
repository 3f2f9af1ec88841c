"""Set of numbers, stored as runs of consecutive numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter


class FreeRuns:
    """Subset of the numbers ``0 .. stop - 1``, stored as runs; initially all of them."""

    def __init__(self, stop: int) -> None:
        self._runs = [range(stop)] if stop else []  # ascending, with gaps between them

    def __iter__(self) -> Iterator[int]:
        return (number for run in self._runs for number in run)

    def best_fit(self, length: int) -> range:
        """Return the shortest run of at least ``length`` numbers, or the longest run if all are shorter."""
        long_enough = [run for run in self._runs if len(run) >= length]
        return min(long_enough, key=len) if long_enough else max(self._runs, key=len)

    def run_from(self, number: int) -> range:
        """Return ``number`` and all numbers after it in its run; empty if ``number`` is not in the set."""
        index = self._index_after(number)
        return range(number, max(number, self._runs[index - 1].stop if index else number))

    def add(self, run: range) -> None:
        """Add a run of numbers, none of which is in the set, and merge it with adjacent runs."""
        first = last = self._index_after(run.start)
        start, stop = run.start, run.stop
        if first and self._runs[first - 1].stop == start:
            first -= 1
            start = self._runs[first].start
        if last < len(self._runs) and self._runs[last].start == stop:
            stop = self._runs[last].stop
            last += 1
        self._runs[first:last] = [range(start, stop)]

    def take(self, run: range) -> None:
        """Remove a run of numbers, all of which are in the set."""
        index = self._index_after(run.start) - 1
        whole = self._runs[index]
        assert index >= 0
        assert run.stop <= whole.stop
        rest = (range(whole.start, run.start), range(run.stop, whole.stop))
        self._runs[index : index + 1] = [part for part in rest if part]

    def _index_after(self, number: int) -> int:
        return bisect_right(self._runs, number, key=attrgetter("start"))


def to_runs(numbers: Iterable[int]) -> list[range]:
    """Group distinct numbers, in any order, into runs of consecutive numbers in ascending order."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
