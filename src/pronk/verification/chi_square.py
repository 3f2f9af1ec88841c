"""Pearson's chi-square test without SciPy, which is not a run-time dependency."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["LEAST_EXPECTED", "chi_square", "merge_small", "p_value"]

# Smallest expected count per cell for which the chi-square approximation is good (Cochran 1954).
LEAST_EXPECTED = 5.0


def merge_small(observed: Sequence[float], expected: Sequence[float]) -> tuple[list[float], list[float]]:
    """Merge cells, smallest first, until each expected count is at least :data:`LEAST_EXPECTED`."""
    merged: list[list[float]] = []
    pool = [0.0, 0.0]  # observed and expected count of the cells being merged
    for want, count in sorted(zip(expected, observed, strict=True)):
        pool = [pool[0] + count, pool[1] + want]
        if pool[1] >= LEAST_EXPECTED:
            merged.append(pool)
            pool = [0.0, 0.0]
    if pool != [0.0, 0.0]:
        if merged:
            merged[-1] = [merged[-1][0] + pool[0], merged[-1][1] + pool[1]]
        else:
            merged.append(pool)
    return [count for count, _ in merged], [want for _, want in merged]


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom; every expected count must be above 0."""
    statistic = sum((count - want) ** 2 / want for count, want in zip(observed, expected, strict=True))
    return statistic, len(observed) - 1


def p_value(statistic: float, freedom: int) -> float:
    """Return the probability of a statistic at least this large; 1 without degrees of freedom."""
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
