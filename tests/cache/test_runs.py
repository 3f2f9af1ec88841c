"""``FreeRuns``, ranges of consecutive free blocks, compared with a search through a set."""

import random
from itertools import pairwise

import pytest

from pronk.cache.blocks import FreeRuns, to_runs


def slow_runs(there: set[int], stop: int) -> list[range]:
    """Return the ranges of consecutive numbers below ``stop`` in a set."""
    edges = [n for n in range(stop + 1) if (n in there) != (n - 1 in there)]
    return [range(a, b) for a, b in pairwise(edges) if a in there]


def test_the_example_of_the_docstring() -> None:
    runs = FreeRuns(9)
    for run in (range(3, 5), range(7, 8)):
        runs.take(run)
    assert [*runs] == [0, 1, 2, 5, 6, 8]
    assert [n in runs for n in range(-1, 10)] == [n in {0, 1, 2, 5, 6, 8} for n in range(-1, 10)]
    assert [runs.best_fit(length) for length in (1, 2, 3, 4)] == [
        range(8, 9),
        range(5, 7),
        range(3),
        range(3),
    ]
    assert [*runs.run_from(1)] == [1, 2]
    assert not runs.run_from(3)
    assert not runs.run_from(-1)
    assert not runs.run_from(9)


def test_no_runs() -> None:
    assert [*FreeRuns(0)] == []
    assert to_runs([]) == []
    assert to_runs([7, 3, 4, 9, 8]) == [range(3, 5), range(7, 10)]


@pytest.mark.parametrize("seed", range(10))
def test_random_changes(seed: int) -> None:
    dice = random.Random(seed)
    stop = dice.randint(1, 40)
    runs = FreeRuns(stop)
    there = set(range(stop))
    for _ in range(300):
        start = dice.randrange(stop)
        part = range(start, min(stop, start + dice.randint(1, 5)))
        if there.issuperset(part):
            runs.take(part)
            there.difference_update(part)
        elif there.isdisjoint(part):
            runs.add(part)
            there.update(part)
        slow = slow_runs(there, stop)
        assert [*runs] == sorted(there)
        assert [n in runs for n in range(stop)] == [n in there for n in range(stop)]
        for number in range(stop + 1):
            assert [*runs.run_from(number)] == [
                n for run in slow if number in run for n in run if n >= number
            ]
        for length in range(1, stop + 1) if slow else ():
            enough = [run for run in slow if len(run) >= length]
            # the first of equal length
            want = min(enough, key=len) if enough else max(slow, key=len)
            assert runs.best_fit(length) == want
