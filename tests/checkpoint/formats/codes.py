"""Random quantized matrices of every kind, and a slow product with rows."""

from fractions import Fraction
from math import ceil
from typing import Literal

import numpy as np

from pronk.base.arrays import Array
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix

# What groups have besides a scale: nothing, a minimum, or a zero point (and then scales of 16
# bits).
Minima = bool | Literal["zeros"]
# (bits, minima, with an input order)
CODED: list[tuple[Bits, Minima, bool]] = [
    (bits, minima, order)
    for bits in (8, 4)
    for minima in (False, True, "zeros")
    for order in (False, True)
]


def some_codes(
    shape: tuple[int, int], bits: Bits, minima: Minima, order: bool, group: int, seed: int = 0
) -> QuantizedMatrix:
    """Return a matrix of random codes, with scales of both signs."""
    random = np.random.default_rng(seed)
    outputs, inputs = shape
    groups = (outputs, ceil(inputs / group))
    codes = random.integers(1 << bits, size=shape, dtype=np.uint8)
    scale = random.standard_normal(groups, np.float32) * np.float32(0.1)
    minimum = random.standard_normal(groups, np.float32) if minima else None
    if minima == "zeros":
        scale = scale.astype(np.float16).astype(np.float32)
        minimum = -scale * random.integers(1 << bits, size=groups).astype(np.float32)
    return QuantizedMatrix(
        codes, scale, minimum, bits, group, random.permutation(inputs) if order else None
    )


def coded_product(weight: QuantizedMatrix, x: Array) -> Array:
    """Return the product, float32 ``[rows, outputs]``, by the rule of ``kernels/README.md``."""
    inputs = weight.shape[1]
    order = range(inputs) if weight.order is None else weight.order.tolist()
    codes = weight.codes.tolist()
    scale = weight.scale
    minimum = weight.minimum
    zeros = np.full(scale.shape, weight.zero)
    if weight.scale_format.zeros and minimum is not None:
        zeros = np.round(-minimum / scale).astype(np.int64)
        minimum = None
    out = np.zeros((len(x), len(codes)), np.float32)
    for r, row in enumerate(x.astype(np.float32)[:, list(order)]):
        for g, start in enumerate(range(0, inputs, weight.group)):
            part = row[start : start + weight.group]
            top = np.abs(part).max()
            rounded = np.rint(part * (np.float32(127) / np.maximum(top, np.float32(1e-30))))
            own = [int(each) for each in rounded.clip(-127, 127)]
            step = top * (np.float32(1) / np.float32(127))
            for n in range(len(codes)):
                group = zip(own, codes[n][start : start + weight.group], strict=True)
                sum_ = sum(a * (b - int(zeros[n, g])) for a, b in group)
                out[r, n] = fused(np.float32(sum_), scale[n, g] * step, out[r, n])
                if minimum is not None:
                    out[r, n] = fused(minimum[n, g], step * np.float32(sum(own)), out[r, n])
    return out


def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """Return ``a * b + c``, rounded once to nearest, ties to even."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))  # rounded twice, so at most one unit in the last place off
    with np.errstate(over="ignore"):
        around = (
            near,
            np.nextafter(near, np.float32(-np.inf)),
            np.nextafter(near, np.float32(np.inf)),
        )

    def distance(each: np.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(each)) - exact), int(each.view(np.int32)) & 1

    return min(around, key=distance)
