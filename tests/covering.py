"""Few cases of a product of options that run always; all others are slow tests."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*factors: Sequence[Any], strength: int = 2) -> list[Any]:
    """Return the cases of the product; those that a covering array leaves out are slow tests.

    Args:
        factors: values of each parameter.
        strength: number of parameters of which every combination of values runs always: 2 covers
            all pairs.
    """
    chosen = {*covering_array([len(values) for values in factors], strength)}
    cases = list[Any]()
    for numbers in product(*(range(len(values)) for values in factors)):
        values = [factor[number] for factor, number in zip(factors, numbers, strict=True)]
        marks = () if numbers in chosen else pytest.mark.slow
        cases.append(pytest.param(*values, marks=marks))
    return cases


def covering_array(sizes: Sequence[int], strength: int) -> list[tuple[int, ...]]:
    """Return cases that cover every combination of ``strength`` values, found greedily and without
    chance.

    A case has the number of a value for each of ``sizes``. Of cases that cover equally many new
    combinations, the one whose values have been used least is taken, so that the values take turns.
    """
    cases = [*product(*map(range, sizes))]
    missing = {combination for case in cases for combination in _combinations(case, strength)}
    used = Counter[tuple[int, int]]()
    chosen = list[tuple[int, ...]]()

    def gain(case: tuple[int, ...]) -> tuple[int, int]:
        new = sum(combination in missing for combination in _combinations(case, strength))
        return new, -sum(used[place] for place in enumerate(case))

    while missing:
        best = max(cases, key=gain)
        missing.difference_update(_combinations(best, strength))
        used.update(enumerate(best))
        chosen.append(best)
    return chosen


def _combinations(case: tuple[int, ...], strength: int) -> list[tuple[tuple[int, int], ...]]:
    return [*combinations(enumerate(case), strength)]
