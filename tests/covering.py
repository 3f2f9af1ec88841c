"""Choice of test cases that run always; all others are slow tests.

``covering`` chooses among all combinations of options: a covering array. The marker ``few`` chooses
among the cases that a test has, however they were parametrized.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*factors: Sequence[Any], strength: int = 2) -> list[Any]:
    """Return all combinations of parameter values; those outside a covering array are slow tests.

    Args:
        factors: values of each parameter.
        strength: number of parameters whose combinations of values are all covered by tests that
            run always: 2 covers all pairs of values.
    """
    chosen = {*covering_array([len(values) for values in factors], strength)}
    cases = list[Any]()
    for numbers in product(*(range(len(values)) for values in factors)):
        values = [factor[number] for factor, number in zip(factors, numbers, strict=True)]
        marks = () if numbers in chosen else pytest.mark.slow
        cases.append(pytest.param(*values, marks=marks))
    return cases


def mark_further_cases(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of tests with the marker ``few(count)`` as slow, all but ``count`` of them.

    The cases that stay have as many values of each parameter as possible (:func:`spread_cases`).
    Cases that are slow tests already do not count.
    """
    cases_of: dict[tuple[Any, str], list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("few") is None or item.get_closest_marker("slow") is not None:
            continue
        assert isinstance(item, pytest.Function)
        cases_of.setdefault((item.parent, item.originalname), []).append(item)
    for cases in cases_of.values():
        marker = cases[0].get_closest_marker("few")
        assert marker is not None
        (count,) = marker.args
        # Parametrization shares the objects that are values, which need not be hashable.
        values = [[id(value) for value in case.callspec.params.values()] for case in cases]
        chosen = spread_cases(values, count)
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker("slow")


def spread_cases(cases: Sequence[Sequence[int]], count: int) -> set[int]:
    """Return the numbers of ``count`` cases that have as many values as possible.

    The search is greedy and deterministic: it always takes the case with most values that no chosen
    case has; among equal ones, evenly spaced cases come first.

    Args:
        cases: for each case, the value of each parameter.
        count: number of cases, at least 1.
    """
    last = len(cases) - 1
    even = [round(number * last / max(1, count - 1)) for number in range(min(count, len(cases)))]
    order = [*dict.fromkeys([*even, *range(len(cases))])]
    missing = {place for case in cases for place in enumerate(case)}
    chosen = set[int]()
    while len(chosen) < min(count, len(cases)):
        free = [number for number in order if number not in chosen]
        best = max(free, key=lambda number: len(missing.intersection(enumerate(cases[number]))))
        missing.difference_update(enumerate(cases[best]))
        chosen.add(best)
    return chosen


def covering_array(sizes: Sequence[int], strength: int) -> list[tuple[int, ...]]:
    """Return cases that cover every combination of the values of any ``strength`` parameters.

    The search is greedy and deterministic: it always takes the case that covers most missing
    combinations, and among equal cases the one whose values have been used least.

    Args:
        sizes: number of values of each parameter.
        strength: number of parameters in a combination.

    Returns:
        Cases; each has the number of a value, from 0, for each parameter.
    """
    cases = {case: _combinations(case, strength) for case in product(*map(range, sizes))}
    missing = {combination for covered in cases.values() for combination in covered}
    used = Counter[tuple[int, int]]()
    chosen = list[tuple[int, ...]]()

    def gain(case: tuple[int, ...]) -> tuple[int, int]:
        new = len(missing.intersection(cases[case]))
        return new, -sum(used[place] for place in enumerate(case))

    while missing:
        best = max(cases, key=gain)
        missing.difference_update(cases[best])
        used.update(enumerate(best))
        chosen.append(best)
    return chosen


def _combinations(case: tuple[int, ...], strength: int) -> list[tuple[tuple[int, int], ...]]:
    return [*combinations(enumerate(case), strength)]
