"""Checks of option values: each function returns a valid value and raises an error for any other.

The message is ``NAME: expected …, found …``, with the name as the user writes it: ``max_tokens``, ``suffix: max_match``
for an option of a drafter, ``num-tokens`` for one of the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import inf

from pronk.errors import OptionError, PronkError

__all__ = ["check_choice", "check_flag", "check_integer", "check_number", "check_path"]


def check_integer(
    name: str, value: object, low: int, high: int | None = None, *, error: type[PronkError] = OptionError
) -> int:
    """Return an integer in ``low..high``, or of at least ``low``; raise ``error`` for others."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        wanted = f"of at least {low}" if high is None else f"in {low}..{high}"
        msg = f"{name}: expected an integer {wanted}, found {value!r}"
        raise error(msg)
    return value


def check_number(
    name: str,
    value: object,
    low: float = -inf,
    high: float = inf,
    *,
    above: bool = False,
    error: type[PronkError] = OptionError,
) -> float:
    """Return a number in ``low..high``, or in ``(low, high]`` if ``above``; raise ``error`` for others."""
    most = sys.float_info.max  # larger integers cannot be converted to float
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not max(low, -most) <= value <= min(high, most)  # false for NaN
        or (above and value == low)
    ):
        msg = f"{name}: expected {_interval(low, high, above=above)}, found {value!r}"
        raise error(msg)
    return float(value)


def _interval(low: float, high: float, *, above: bool) -> str:
    if high == inf:
        return "a finite number" + ("" if low == -inf else f" {'above' if above else 'of at least'} {low:g}")
    return f"a number above {low:g} and at most {high:g}" if above else f"a number in {low:g}..{high:g}"


def check_flag(name: str, value: object, *, error: type[PronkError] = OptionError) -> bool:
    """Return a boolean; raise ``error`` for others, 0 and 1 included."""
    if not isinstance(value, bool):
        msg = f"{name}: expected true or false, found {value!r}"
        raise error(msg)
    return value


def check_choice(name: str, value: object, choices: Sequence[str], *, error: type[PronkError] = OptionError) -> str:
    """Return one of ``choices``; raise ``error`` for other values."""
    if not isinstance(value, str) or value not in choices:
        msg = f"{name}: expected one of {', '.join(choices)}, found {value!r}"
        raise error(msg)
    return value


def check_path(name: str, value: object) -> str | None:
    """Return a path as text, or ``None`` for no file; raise ``OptionError`` for others."""
    if value is not None and not (isinstance(value, str) and value):
        msg = f"{name}: expected a path, found {value!r}"
        raise OptionError(msg)
    return value
