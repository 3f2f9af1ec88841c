"""Checks of option values: accepted values, and the errors for refused ones."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pronk.base.checks import check_choice, check_flag, check_integer, check_number, check_path
from pronk.base.errors import ConfigError, OptionError, refuse


@pytest.mark.parametrize(
    ("check", "value", "rule"),
    [
        (check_integer, 0, (0, 3)),
        (check_integer, 3, (0, 3)),
        (check_integer, 10**400, (0,)),
        (check_number, 0, (0, 1)),
        (check_number, 1, (0, 1)),
        (check_number, -2.5, ()),
        (check_flag, False, ()),
        (check_choice, "up", (("up", "down"),)),
        (check_path, "a/b", ()),
        (check_path, None, ()),
    ],
)
def test_accepted_values_are_returned(
    check: Callable[..., Any], value: object, rule: tuple[Any, ...]
) -> None:
    assert check("x", value, *rule) == value
    assert check_number("x", math.ulp(0.0), 0, exclusive_min=True) > 0


@pytest.mark.parametrize(
    ("check", "value", "rule", "message"),
    [
        *(
            (check_integer, each, (1, 3), "an integer in 1..3")
            for each in (0, 4, 2.0, "2", True, None, np.int64(2))
        ),
        *((check_integer, each, (1,), "an integer of at least 1") for each in (0, False)),
        *(
            (check_number, each, (0, 0.5), "a number in 0..0.5")
            for each in (-0.1, 1, math.nan, True, "0", None)
        ),
        *(
            (check_number, each, (), "a finite number")
            for each in (math.inf, -math.inf, math.nan, 10**400)
        ),
        *((check_number, each, (2,), "a finite number of at least 2") for each in (1.9, math.inf)),
        *((check_flag, each, (), "true or false") for each in (0, 1, "true", None)),
        *(
            (check_choice, each, (("up", "down"),), "one of up, down")
            for each in ("left", "y", None, ["up"])
        ),
        *((check_path, each, (), "a path") for each in ("", 3, ["a"])),
    ],
)
def test_refused_values(
    check: Callable[..., Any], value: object, rule: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(OptionError) as error:
        check("suffix: max_match", value, *rule)
    assert str(error.value) == f"suffix: max_match: expected {message}, found {value!r}"


@pytest.mark.parametrize(
    ("value", "near"),
    [
        ("upp", "up"),
        ("UP", "up"),
        ("donw", "down"),
        ("down_", "down"),
        ("left-right", "left_right"),
    ],
)
def test_a_misspelled_choice_gets_the_closest_choices(value: str, near: str) -> None:
    with pytest.raises(OptionError) as error:
        check_choice("way", value, ("up", "down", "left_right"))
    assert str(error.value) == (
        f"way: expected one of up, down, left_right, found {value!r}; did you mean {near}?"
    )


def test_the_end_of_an_interval_may_be_left_out() -> None:
    with pytest.raises(ConfigError, match=r"^x: expected a finite number above 0, found 0$"):
        check_number("x", 0, 0, exclusive_min=True, error=ConfigError)
    with pytest.raises(
        ConfigError, match=r"^x: expected a number above 0 and at most 1, found 0.0$"
    ):
        check_number("x", 0.0, 0, 1, exclusive_min=True, error=ConfigError)


def test_refusals_keep_the_error_that_is_being_handled() -> None:
    def convert(text: str) -> None:
        try:
            int(text)
        except ValueError:
            refuse("option", "wrong", OptionError)

    with pytest.raises(OptionError, match="option: wrong") as caught:
        convert("x")
    assert isinstance(caught.value.__context__, ValueError)
    assert not caught.value.__suppress_context__
