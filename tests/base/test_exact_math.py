"""Exponentials, logarithms, rotations and sums with specified bits."""

import math
from collections.abc import Callable, Iterable
from decimal import Context, Decimal

import numpy as np
import pytest
from numpy.typing import NDArray

from pronk.base.exact_math import LANES, cos_sin, exp, log, power, total

Double = NDArray[np.float64]
_PRECISE = Context(prec=40)  # Decimal rounds exp and ln correctly


def units_off(
    found: Iterable[float], numbers: Iterable[float], rule: Callable[[Decimal], Decimal]
) -> float:
    """Return the largest error of ``found`` as values of ``rule``, in units in the last place."""
    worst = 0.0
    for value, number in zip(found, numbers, strict=True):
        exact = rule(Decimal(number))
        unit = Decimal(float(np.spacing(abs(float(exact)))))
        worst = max(worst, float(abs(Decimal(value) - exact) / unit))
    return worst


def test_exponentials_have_an_error_below_one_unit() -> None:
    random = np.random.default_rng(0)
    numbers = np.concatenate(
        [
            random.uniform(-708, 709, 1000),
            random.uniform(-30, 0, 1000),
            # beside the odd multiples of ln(2) / 2, where the reduced number is largest
            (np.arange(-50, 50) + 0.5) * math.log(2) + random.uniform(-1e-14, 1e-14, 100),
            random.uniform(-1, 1, 500) * 2.0 ** -random.integers(1, 60, 500),
        ]
    )
    assert units_off(exp(numbers), numbers, _PRECISE.exp) < 1.0


def test_logarithms_have_an_error_below_one_unit() -> None:
    random = np.random.default_rng(0)
    numbers = np.concatenate(
        [
            (random.integers(0, 2**52, 1000) + 0.5) * 2.0**-52,  # the numbers of the noise
            1.0 + random.uniform(-1, 1, 1000) * 2.0 ** -random.integers(1, 52, 1000),
            random.uniform(0.5, 1.5, 500) * 2.0 ** random.integers(-1000, 950, 500),
            # beside the limits of the reduced number
            math.sqrt(0.5) * (1.0 + random.uniform(-1e-15, 1e-15, 100)),
        ]
    )
    numbers = numbers[numbers != 1.0]
    assert units_off(log(numbers), numbers, _PRECISE.ln) < 1.0


def test_special_values() -> None:
    numbers = [0.0, -0.0, -np.inf, np.inf, np.nan, -708.5, 709.5]
    np.testing.assert_array_equal(exp(numbers), [1.0, 1.0, 0.0, np.inf, np.nan, 0.0, np.inf])
    np.testing.assert_array_equal(log([1.0, np.inf, np.nan]), [0.0, np.nan, np.nan])
    smallest = 5e-324
    assert log(smallest) == pytest.approx(-1074 * math.log(2), rel=1e-15)


def test_powers() -> None:
    exponents = np.arange(0, 128, 2) / 128
    expected = [10000.0 ** float(each) for each in exponents]
    np.testing.assert_allclose(power(10000.0, exponents), expected, rtol=2e-15)


@pytest.mark.parametrize("largest", [1.0, 1e4, 1e6])
def test_cosines_and_sines(largest: float) -> None:
    random = np.random.default_rng(0)
    quarters = np.arange(40) * (math.pi / 2)
    angles = np.concatenate([random.uniform(-largest, largest, 5000), quarters])
    cosines, sines = cos_sin(angles)
    limit = 2.0**-52
    for angle, cosine, sine in zip(angles.tolist(), cosines, sines, strict=True):
        assert abs(cosine - math.cos(angle)) <= limit
        assert abs(sine - math.sin(angle)) <= limit


def test_rotations_of_long_texts_are_exact_in_float32() -> None:
    angles = np.random.default_rng(0).uniform(0, 1e8, 5000)
    cosines, sines = cos_sin(angles)
    np.testing.assert_allclose(cosines, [math.cos(each) for each in angles], atol=2.0**-26)
    np.testing.assert_allclose(sines, [math.sin(each) for each in angles], atol=2.0**-26)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 5000])
def test_totals_have_one_order(size: int) -> None:
    random = np.random.default_rng(size)
    values = random.uniform(-1, 1, size) * 2.0 ** random.integers(-30, 30, size)
    lanes = [0.0] * LANES
    for number, value in enumerate(values.tolist()):
        lanes[number % LANES] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [low + high for low, high in zip(lanes[:half], lanes[half:], strict=True)]
    assert total(values) == lanes[0]
