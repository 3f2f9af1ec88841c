"""The functions of :mod:`pronk.base.exact_math` for long rows, computed by the kernels' library.

The bits are the same. Without a usable library, NumPy computes them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pronk.base import exact_math
from pronk.base.exact_math import Double
from pronk.kernels.library import KernelsError, installed_library, open_library


class Library(NamedTuple):
    """The kernels' library, and the number of the widest instruction set of this processor."""

    functions: Any
    isa: int


@cache
def find_library() -> Library | None:
    """Return the installed library, or ``None`` if it is not usable."""
    try:
        functions = open_library(installed_library())
    except KernelsError:
        return None
    return Library(functions, int(functions.pronk_detect()))


def exp(x: ArrayLike) -> Double:
    """Return ``e ** x``; see :func:`pronk.base.exact_math.exp`."""
    library = find_library()
    if library is None:
        return exact_math.exp(x)
    result = np.array(x, np.float64, order="C")
    library.functions.pronk_exp(result.ctypes.data, result.size, library.isa)
    return result


def log(x: ArrayLike) -> Double:
    """Return the natural logarithm of ``x``; see :func:`pronk.base.exact_math.log`."""
    result = np.array(x, np.float64, order="C")
    replace_by_log(result)
    return result


def replace_by_log(x: Double) -> None:
    """Replace the numbers of a contiguous array by their logarithms, as :func:`log` does."""
    library = find_library()
    if library is None:
        x[...] = exact_math.log(x)
    else:
        library.functions.pronk_log(x.ctypes.data, x.size, library.isa)


def total(values: NDArray[Any]) -> float:
    """Return the sum of a vector, in float64; see :func:`pronk.base.exact_math.total`."""
    library = find_library()
    if library is None:
        return exact_math.total(values)
    vector = np.ascontiguousarray(values, np.float64)
    return float(library.functions.pronk_total(vector.ctypes.data, vector.size, library.isa))


def exp_total(scores: NDArray[np.float32], largest: float) -> float:
    """Return the sum of ``exp(scores - largest)`` of a vector of float32, in float64.

    The differences are float64. With ``largest`` the largest score, this is the divisor of softmax.
    """
    library = find_library()
    if library is None:
        return exact_math.total(exact_math.exp(scores.astype(np.float64) - largest))
    vector = np.ascontiguousarray(scores, np.float32)
    function = library.functions.pronk_exp_total
    return float(function(vector.ctypes.data, vector.size, largest, library.isa))


def cumulative_sums(values: NDArray[np.float64]) -> Double:
    """Return the sums of the first 1, 2, … values of a vector, float64.

    Each sum is the one before plus a value, as NumPy's ``accumulate`` defines it.
    """
    return np.add.accumulate(values)
