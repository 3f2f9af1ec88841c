"""Pearson's chi-square test: quantiles, merged cells, and the share of correct samples that fail."""

import math

import numpy as np
import pytest

from pronk.lab.verification.chi_square import MIN_EXPECTED, chi_square, merge_small, p_value

# Quantiles from tables of the chi-square distribution: (statistic, degrees of freedom, p-value).
CRITICAL = [(3.841459, 1, 0.05), (9.487729, 4, 0.05), (23.209251, 10, 0.01), (37.697298, 15, 0.001)]


@pytest.mark.parametrize(("statistic", "freedom", "probability"), CRITICAL)
def test_known_quantiles(statistic: float, freedom: int, probability: float) -> None:
    assert p_value(statistic, freedom) == pytest.approx(probability, rel=1e-5)


def test_extremes() -> None:
    assert p_value(0.0, 3) == 1.0
    assert p_value(1e4, 3) == 0.0
    assert p_value(5.0, 0) == 1.0
    assert p_value(60.0, 14) == pytest.approx(1.2e-7, rel=0.1)


def test_large_degrees_of_freedom() -> None:
    """Near the mean, the distribution approaches a normal one."""
    for freedom in (10_000, 100_000):
        for deviations in (-6.0, -1.0, 0.0, 1.0, 6.0):
            statistic = freedom + deviations * (2 * freedom) ** 0.5
            assert p_value(statistic, freedom) == pytest.approx(
                math.erfc(deviations / 2**0.5) / 2, abs=0.005
            )


def test_statistic_by_hand() -> None:
    assert chi_square([12, 8], [10, 10]) == (pytest.approx(0.8), 1)


def test_small_cells_are_merged_from_the_smallest_on() -> None:
    observed, expected = merge_small([100, 3, 0, 2, 7], [90.0, 1.0, 2.0, 3.0, 6.0])
    assert expected == [6.0, 6.0, 90.0]
    assert observed == [5, 7, 100]
    assert merge_small([1, 2], [1.0, 2.0]) == ([3], [3.0])  # even the sum is below MIN_EXPECTED
    # a small remainder joins the largest cell
    assert merge_small([0, 4, 50], [0.0, 4.0, 50.0]) == ([54], [54.0])
    _, expected = merge_small([0] * 30, [float(n) / 3 for n in range(30)])
    assert min(expected) >= MIN_EXPECTED
    assert sum(expected) == pytest.approx(sum(range(30)) / 3)


def test_p_values_of_correct_samples_are_uniform() -> None:
    dice = np.random.default_rng(0)
    probs = np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.019, 0.001])
    values = []
    for _ in range(400):
        merged = merge_small(dice.multinomial(500, probs).tolist(), (500 * probs).tolist())
        values.append(p_value(*chi_square(*merged)))
    assert 0.02 < sum(value < 0.05 for value in values) / 400 < 0.08
    assert 0.42 < sum(value < 0.5 for value in values) / 400 < 0.58
