"""Chi-square tests of a sample against a distribution."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pronk.lab.verification import distribution as pearson


def p_value(counts: ArrayLike, probs: ArrayLike) -> float:
    """Return the p-value of Pearson's test; raise if a value of probability 0 occurred."""
    observed, expected = (np.asarray(numbers, np.float64).ravel() for numbers in (counts, probs))
    expected = expected / expected.sum() * observed.sum()
    assert not bool((observed[expected == 0] > 0).any()), "something occurred that has probability 0"
    possible = expected > 0
    assert bool((expected[possible] >= pearson.MIN_EXPECTED).all()), "too few draws for this test"
    return pearson.p_value(*pearson.chi_square(observed[possible].tolist(), expected[possible].tolist()))


def p_value_of(sample: Sequence[Hashable], distribution: Mapping[Any, float], least_cells: int = 2) -> float:
    """Return the p-value of a sample; rare values of the distribution are merged into common cells."""
    counts = Counter(sample)
    possible = {value: chance for value, chance in distribution.items() if chance > 0}
    assert counts.keys() <= possible.keys(), "something occurred that has probability 0"
    expected = [chance * len(sample) for chance in possible.values()]
    observed, expected = pearson.merge_small([counts[value] for value in possible], expected)
    assert len(observed) >= least_cells
    return pearson.p_value(*pearson.chi_square(observed, expected))
