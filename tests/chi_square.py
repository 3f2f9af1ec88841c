"""Chi-square tests of a sample against a distribution."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

MIN_EXPECTED = 5.0  # expected count of a cell above which Pearson's approximation is good


def p_value(counts: ArrayLike, probs: ArrayLike) -> float:
    """Return the p-value of Pearson's test; raise if a value of probability 0 occurred."""
    observed, expected = (np.asarray(numbers, np.float64).ravel() for numbers in (counts, probs))
    expected = expected / expected.sum() * observed.sum()
    assert not bool((observed[expected == 0] > 0).any()), (
        "something occurred that has probability 0"
    )
    possible = expected > 0
    assert bool((expected[possible] >= MIN_EXPECTED).all()), "too few draws for this test"
    return pearson(observed[possible].tolist(), expected[possible].tolist())


def p_value_of(
    sample: Sequence[Hashable], distribution: Mapping[Any, float], least_cells: int = 2
) -> float:
    """Return the p-value of a sample, with rare values of the distribution merged into cells.

    Args:
        sample: the values.
        distribution: probability of each value.
        least_cells: number of cells below which the test fails.
    """
    counts = Counter(sample)
    possible = {value: chance for value, chance in distribution.items() if chance > 0}
    assert counts.keys() <= possible.keys(), "something occurred that has probability 0"
    observed = [0.0]
    expected = [0.0]
    for value in sorted(possible, key=lambda value: possible[value]):
        if expected[-1] >= MIN_EXPECTED:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += counts[value]
        expected[-1] += possible[value] * len(sample)
    assert expected[-1] >= MIN_EXPECTED, "too few draws for this test"
    assert len(observed) >= least_cells
    return pearson(observed, expected)


def pearson(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Return the probability of a chi-square statistic at least as large by chance.

    It is Q(freedom / 2, statistic / 2), the regularized upper incomplete gamma function.
    """
    statistic = sum(
        (count - mean) ** 2 / mean for count, mean in zip(observed, expected, strict=True)
    )
    halves = (
        torch.tensor(value / 2, dtype=torch.float64) for value in (len(observed) - 1, statistic)
    )
    return float(torch.special.gammaincc(*halves))
