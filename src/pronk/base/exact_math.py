"""Exponential, logarithm, cosine, sine and sums with specified bits.

NumPy and the C library choose their own ``exp``, ``log`` and order of a sum for each processor and
version, so their last bits differ between machines. The functions here use only the operations that
IEEE 754 rounds in one way: ``+ - * /`` and comparisons of float64, without fused multiply-adds.
Every processor therefore gives the same bits.

Formulas and coefficients are those of fdlibm 5.3 (Sun Microsystems 1993: ``e_exp.c``, ``e_log.c``,
``k_sin.c``, ``k_cos.c``). ``exp`` and ``log`` have an error below 1 unit in the last place.
``kernels/csrc/exact_math.h`` computes the same operations, faster; :mod:`pronk.kernels.exact_math`
calls it for long rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Double = NDArray[np.float64]

# ln 2 in two parts. The first has 21 zero bits at its end: its products with integers below 2**20
# are exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_INVERSE_LN2 = 1.44269504088896338700e00

# e**x is 0 below the first limit (the result would be below the normal numbers), and infinite above
# the second.
_EXP_LOWEST = -708.0
_EXP_HIGHEST = 709.0
_EXP = (
    1.66666666666666019037e-01,
    -2.77777777770155933842e-03,
    6.61375632143793436117e-05,
    -1.65339022054652515390e-06,
    4.13813679705723846039e-08,
)
_LOG = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
_SQRT_HALF = 0.7071067811865476

# pi / 2 in three parts. The first two have 33 bits: their products with integers below 2**20 are
# exact.
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_INVERSE_HALF_PI = 6.36619772367581382433e-01
_SIN = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
_COS = (
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)

# Number of partial sums of :func:`total`.
LANES = 256


def exp(x: ArrayLike) -> Double:
    """Return ``e ** x``, float64 of the same shape.

    The result is 0 for x below -708, infinite for x above 709, and NaN for NaN.
    """
    with np.errstate(all="ignore"):
        given = np.asarray(x, np.float64)
        # Numbers outside the limits are replaced below.
        is_outside = (given < _EXP_LOWEST) | (given > _EXP_HIGHEST)
        bounded = np.where(is_outside, 0.0, given)
        power = np.rint(bounded * _INVERSE_LN2)
        high = bounded - power * _LN2_HIGH
        low = power * _LN2_LOW
        r = high - low
        c = r - r * r * _horner(r * r, _EXP)
        fraction = 1.0 - ((low - (r * c) / (2.0 - c)) - high)
        # A NaN has no integer; any does, as its fraction is NaN.
        exponent = np.where(np.isnan(power), 0.0, power).astype(np.int32)
        result = np.ldexp(fraction, exponent)
        result = np.where(given < _EXP_LOWEST, 0.0, result)
        return np.where(given > _EXP_HIGHEST, np.inf, result)


def log(x: ArrayLike) -> Double:
    """Return the natural logarithm of ``x``, float64 of the same shape.

    ``x`` must be positive and below 2**960. The result is NaN for infinity and NaN.
    """
    with np.errstate(all="ignore"):
        given = np.asarray(x, np.float64)
        fraction, exponent = np.frexp(given)
        # x = fraction · 2**exponent, with the fraction in [sqrt(1/2), sqrt(2))
        is_small = fraction < _SQRT_HALF
        fraction = np.where(is_small, 2.0 * fraction, fraction)
        power = (exponent - is_small).astype(np.float64)
        f = fraction - 1.0
        s = f / (2.0 + f)
        z = s * s
        half_square = 0.5 * f * f
        series = z * _horner(z, _LOG)
        tail = half_square - (s * (half_square + series) + power * _LN2_LOW)
        return power * _LN2_HIGH - (tail - f) + (given - given)


def power(base: float, exponents: ArrayLike) -> Double:
    """Return ``base ** exponents`` for a base above 0, float64 of the shape of the exponents.

    The relative error is about ``2**-53`` times the logarithm of the result.
    """
    return exp(np.asarray(exponents, np.float64) * log(base))


def cos_sin(angles: ArrayLike) -> tuple[Double, Double]:
    """Return cosine and sine of angles in radians, float64 of the same shape.

    For angles of at most 2**20 the error is below ``2**-52``. For larger ones, it grows with the
    angle.
    """
    x = np.asarray(angles, np.float64)
    quarter = np.rint(x * _INVERSE_HALF_PI)
    y = x - quarter * _HALF_PI[0]
    y = y - quarter * _HALF_PI[1]
    y = y - quarter * _HALF_PI[2]
    z = y * y
    sine = y + y * z * _horner(z, _SIN)
    cosine = 1.0 - (0.5 * z - z * z * _horner(z, _COS))
    # Angles of an odd number of quarter turns exchange cosine and sine.
    turn = quarter.astype(np.int64) & 3
    is_odd = (turn & 1) == 1
    first = np.where(is_odd, sine, cosine)
    second = np.where(is_odd, cosine, sine)
    is_left = (turn == 1) | (turn == 2)
    is_below = turn >= 2
    return np.where(is_left, -first, first), np.where(is_below, -second, second)


def total(values: NDArray[Any]) -> float:
    """Return the sum of a vector, in float64.

    Lane ``i`` of 256 adds the values ``i``, ``i + 256``, … in this order, starting with 0. Then the
    upper half of the lanes is added to the lower half, until one lane is left.
    """
    padded = np.zeros((math.ceil(len(values) / LANES), LANES))
    padded.reshape(-1)[: len(values)] = values
    lanes = np.zeros(LANES)
    for row in padded:
        lanes = lanes + row
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def _horner(x: Double, coefficients: tuple[float, ...]) -> Double:
    """Return ``c[0] + x · (c[1] + x · (c[2] + …))``."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = coefficient + x * result
    return result
