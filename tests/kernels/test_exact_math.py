"""The kernels' exponentials, logarithms and sums have the bits that NumPy's operations define."""

import math
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest

from pronk.base import exact_math as defined
from pronk.kernels import exact_math
from pronk.kernels.library import INSTRUCTION_SETS, candidates

SIZES = (0, 1, 7, 255, 256, 257, 5000)


@pytest.fixture(params=[kernels.name for kernels in candidates()])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute with one instruction set of this processor."""
    name: str = request.param
    library = exact_math.find_library()
    assert library is not None
    chosen = library._replace(isa=INSTRUCTION_SETS.index(name))
    monkeypatch.setattr(exact_math, "find_library", lambda: chosen)
    return name


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("size", SIZES)
def test_bits_are_those_of_the_definition(size: int) -> None:
    random = np.random.default_rng(size)
    numbers = random.uniform(-30, 1, size)
    positive = random.uniform(1e-9, 1, size) * 2.0 ** random.integers(-1060, 900, size)
    scores = random.normal(0, 4, size).astype(np.float32)
    largest = float(scores.max(initial=0.0))
    np.testing.assert_array_equal(exact_math.exp(numbers), defined.exp(numbers))
    np.testing.assert_array_equal(exact_math.log(positive), defined.log(positive))
    assert exact_math.total(numbers) == defined.total(numbers)
    expected = defined.total(defined.exp(scores.astype(np.float64) - largest))
    assert exact_math.exp_total(scores, largest) == expected


@pytest.mark.usefixtures("instruction_set")
def test_special_values_are_those_of_the_definition() -> None:
    # more than one block of the vectorized loop
    numbers = np.tile([0.0, -0.0, -math.inf, math.inf, math.nan, -708.0, -708.5, 709.0, 709.5], 40)
    np.testing.assert_array_equal(exact_math.exp(numbers), defined.exp(numbers))
    positive = np.tile([1.0, 5e-324, 2.0**-1022, math.inf, math.nan, 2.0**959], 50)
    np.testing.assert_array_equal(exact_math.log(positive), defined.log(positive))


def test_arguments_are_not_changed() -> None:
    numbers = np.linspace(0.5, 2.0, 300)
    for function in (exact_math.exp, exact_math.log):
        function(numbers)
        np.testing.assert_array_equal(numbers, np.linspace(0.5, 2.0, 300))
    assert exact_math.log(0.5) == defined.log(0.5)


def test_views_and_other_types_are_read_by_value() -> None:
    wide = np.random.default_rng(0).normal(0, 4, (300, 2)).astype(np.float32)
    column = wide[:, 0]
    packed = column.copy()
    assert exact_math.exp_total(column, 1.0) == exact_math.exp_total(packed, 1.0)
    assert exact_math.total(column) == exact_math.total(packed.astype(np.float64))
    np.testing.assert_array_equal(exact_math.exp(column), exact_math.exp(packed))


def test_cumulative_sums_add_one_value_at_a_time() -> None:
    values = np.random.default_rng(0).uniform(0, 1, 3000) * 1e-3
    assert exact_math.cumulative_sums(values).tolist() == [*accumulate(values.tolist())]


@pytest.mark.parametrize("name", ["exp", "log", "total"])
def test_without_a_library_the_bits_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.random.default_rng(0).uniform(0.1, 20, 1000)
    function: Callable[..., object] = getattr(exact_math, name)
    expected = function(numbers)
    total = exact_math.exp_total(numbers.astype(np.float32), 20.0)
    monkeypatch.setattr(exact_math, "find_library", lambda: None)
    np.testing.assert_array_equal(function(numbers), expected)
    assert exact_math.exp_total(numbers.astype(np.float32), 20.0) == total
