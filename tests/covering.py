"""Choice of test cases among all combinations of options: a covering array.

The chosen cases run always. All other combinations are slow tests.
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
