"""Pearson's chi-square test of counts against expected counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Minimum expected count of a cell; with fewer, the chi-square approximation is poor (Cochran 1954).
MIN_EXPECTED = 5.0


def merge_small(
    observed: Sequence[float], expected: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Merge cells, smallest expected count first, until each expects at least :data:`MIN_EXPECTED`.

    Returns the observed and the expected count of each merged cell. All cells become one if the
    total is too small.
    """
    merged: list[list[float]] = []
    merging = [0.0, 0.0]  # sums of observed and expected counts of the cells merged so far
    for mean, count in sorted(zip(expected, observed, strict=True)):
        merging = [merging[0] + count, merging[1] + mean]
        if merging[1] >= MIN_EXPECTED:
            merged.append(merging)
            merging = [0.0, 0.0]
    if merging != [0.0, 0.0]:
        last = merged.pop() if merged else [0.0, 0.0]
        merged.append([last[0] + merging[0], last[1] + merging[1]])
    return [count for count, _ in merged], [mean for _, mean in merged]


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """Return Pearson's chi-square statistic and its degrees of freedom.

    The statistic is ``Σ (observed - expected)² / expected``, the degrees of freedom are the number
    of cells - 1. Expected counts must be above 0.
    """
    statistic = sum(
        (count - mean) ** 2 / mean for count, mean in zip(observed, expected, strict=True)
    )
    return statistic, len(observed) - 1


def p_value(statistic: float, freedom: int) -> float:
    """Return the probability of a statistic at least this large by chance; 1 if ``freedom`` is 0.

    This is the regularized upper incomplete gamma function ``Q(freedom / 2, x)`` with ``x =
    statistic / 2`` (SciPy, which has this function, is not a run-time dependency)::

        Q(0, x) = 0
        Q(1/2, x) = erfc(sqrt(x))
        Q(a + 1, x) = Q(a, x) + x^a e^-x / gamma(a + 1)
    """
    if freedom < 1 or statistic <= 0.0:
        return 1.0
    x = statistic / 2
    odd = freedom % 2
    terms: list[float] = []
    for i in range(freedom // 2):
        a = i + odd / 2
        terms.append(math.exp(a * math.log(x) - x - math.lgamma(a + 1.0)))
    return min(1.0, odd * math.erfc(math.sqrt(x)) + math.fsum(terms))
