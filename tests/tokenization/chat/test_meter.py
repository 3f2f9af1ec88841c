"""What values cost."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Undefined

from pronk.tokenization.chat.meter import STEP, Meter, OverBudgetError, count, extent


@pytest.mark.parametrize(
    ("value", "units"),
    [
        ("abc", STEP + 3),
        (None, STEP),
        (7, STEP),
        (1.5, STEP),
        ([], STEP),
        (["a", ("b",)], 4 * STEP + 2),
        ({"ab": 1}, 3 * STEP + 2),
        ({1: 2}.items(), 4 * STEP),
        (range(5), 6 * STEP),
        (iter(["a", "b"]), 3 * STEP + 2),
        (Undefined(), STEP),
    ],
)
def test_units_of_a_value(value: Any, units: int) -> None:
    assert extent(value) == units
    Meter(units).whole(value)
    with pytest.raises(OverBudgetError):
        Meter(units - 1).whole(value)


def test_an_iterator_is_not_read() -> None:
    items = iter([1, 2, 3])
    next(items)
    assert (extent(items), count(items)) == (3 * STEP, 2)
    assert list(items) == [2, 3]


def test_a_list_counts_wherever_it_is() -> None:
    value: list[Any] = ["a"]
    for _ in range(8):
        value = [value, value]
    assert extent(value) == 2**8 * (2 * STEP + 1) + (2**8 - 1) * STEP
    for _ in range(50):
        value = [value, value]
    with pytest.raises(OverBudgetError):
        Meter(10_000).whole(value)


def test_lists_in_lists_have_a_limit() -> None:
    value: tuple[Any, ...] = ()
    for _ in range(90):
        value = (value,)
    extent(value)
    for _ in range(20):
        value = (value,)
    with pytest.raises(SecurityError, match="expected lists in lists of at most 100 levels, found more"):
        extent(value)
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(SecurityError, match="at most 100 levels"):
        extent(circle)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**4096, "expected integers of at most 4096 bits, found 4097"),
        ([-(2**4096)], "expected integers of at most 4096 bits"),
        (LoopContext([1], Undefined), "expected a value, found the loop itself"),
    ],
)
def test_values_that_cost_more_than_they_show(value: Any, message: str) -> None:
    extent(2**4095)
    with pytest.raises(SecurityError, match=message):
        extent(value)


def test_count() -> None:
    assert [count(each) for each in ("abc", [1], {}, range(7), None, 5, iter([1, 2]))] == [3, 1, 0, 7, 0, 0, 2]
