"""Pearson's chi-square test without SciPy, which is not a run-time dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["MIN_EXPECTED", "chi_square", "merge_small", "p_value"]

# Minimum expected count of a cell; with fewer, the chi-square approximation is poor (Cochran 1954).
MIN_EXPECTED = 5.0

_EPSILON = 1e-15  # relative size of the last term of a series
_TINY = 1e-300  # replaces a denominator that is 0


def merge_small(observed: Sequence[float], expected: Sequence[float]) -> tuple[list[float], list[float]]:
    """Merge cells, smallest expected count first, until each expects at least :data:`MIN_EXPECTED`.

    Return the observed and the expected count of each merged cell; all cells become one if the total is too small.
    """
    merged: list[list[float]] = []
    merging = [0.0, 0.0]  # sums of observed and expected counts of the cells merged so far
    for mean, count in sorted(zip(expected, observed, strict=True)):
        merging = [merging[0] + count, merging[1] + mean]
        if merging[1] >= MIN_EXPECTED:
            merged.append(merging)
            merging = [0.0, 0.0]
    if merging != [0.0, 0.0]:
        if merged:
            merged[-1] = [merged[-1][0] + merging[0], merged[-1][1] + merging[1]]
        else:
            merged.append(merging)
    return [count for count, _ in merged], [mean for _, mean in merged]


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """Return the chi-square statistic and its degrees of freedom; expected counts must be above 0."""
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(observed, expected, strict=True))
    return statistic, len(observed) - 1


def p_value(statistic: float, freedom: int) -> float:
    """Return the probability of a statistic at least this large by chance; 1 if ``freedom`` is 0."""
    if freedom < 1:
        return 1.0
    return _upper_gamma(freedom / 2, statistic / 2)


def _upper_gamma(a: float, x: float) -> float:
    """Return the regularized upper incomplete gamma function Q(a, x).

    Both ways are those of Press et al., Numerical Recipes, section 6.2: for small x the power series of 1 - Q, for
    large x the continued fraction of Q, computed by the modified method of Lentz.
    """
    if x <= 0.0:
        return 1.0
    factor = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        term = total = 1.0 / a
        n = a
        while term > total * _EPSILON:
            n += 1.0
            term *= x / n
            total += term
        return max(0.0, 1.0 - factor * total)
    b = x + 1.0 - a
    c, d = 1.0 / _TINY, 1.0 / b
    fraction, change, i = d, 0.0, 0
    while abs(change - 1.0) > _EPSILON:
        i += 1
        numerator = i * (a - i)
        b += 2.0
        d = 1.0 / _nonzero(numerator * d + b)
        c = _nonzero(b + numerator / c)
        change = c * d
        fraction *= change
    return factor * fraction


def _nonzero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
