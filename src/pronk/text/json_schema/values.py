"""Values in schemas, as llguidance reads them: numbers are 64-bit floating-point numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import inf, isfinite, nextafter
from typing import Any

MAX_EXACT = 2**53  # integers up to this bound are exact as 64-bit floating-point numbers
MAX_INTEGER = 2**63 - 1
# Control characters that JSON has no short escape for, such as the \n of a line feed.
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def without_integer_bounds(
    bounds: Mapping[str, Any], lowest: float, highest: float
) -> dict[str, Any]:
    """Replace exclusive bounds that llguidance's grammar of numbers would include by mistake.

    llguidance makes the mistake with an integer bound if no other integer lies between the bounds:
    with 0 in 0 < x < 0.5, for example. The next floating-point number becomes an inclusive bound
    instead.

    Args:
        bounds: ``minimum``, ``exclusiveMinimum``, ``maximum`` and ``exclusiveMaximum``, if given.
        lowest: lower bound that applies: the larger of ``minimum`` and ``exclusiveMinimum``.
        highest: upper bound that applies: the smaller of ``maximum`` and ``exclusiveMaximum``.
    """
    found = {**bounds}
    if (
        found.get("exclusiveMinimum") == lowest >= 0
        and lowest == int(lowest)
        and highest < lowest + 1
    ):
        found["minimum"] = _next_above(found.pop("exclusiveMinimum"))
    if (
        found.get("exclusiveMaximum") == highest <= 0
        and highest == int(highest)
        and lowest > highest - 1
    ):
        found["maximum"] = -_next_above(-found.pop("exclusiveMaximum"))
    return found


def _next_above(value: float) -> float:
    # The floating-point number next to 0 has hundreds of digits; 1e-30 is close enough.
    return max(nextafter(value, inf), 1e-30)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def is_exact(value: float, limit: int) -> bool:
    """Return whether llguidance, which reads numbers as 64-bit floats, uses exactly ``value``.

    ``limit`` is the largest absolute value that counts as exact.
    """
    if abs(value) > limit:
        return False
    # llguidance converts the float to a 64-bit integer, which saturates.
    return isinstance(value, float) or min(int(float(value)), MAX_INTEGER) == value


def is_exact_value(value: Any) -> bool:
    """Return whether llguidance uses all numbers in a value of ``enum`` exactly as they are."""
    if isinstance(value, Mapping):
        return all(map(is_exact_value, value.values()))
    if isinstance(value, list):
        return all(map(is_exact_value, value))
    return not isinstance(value, (int, float)) or is_exact(value, MAX_EXACT)


def has_controls(value: Any) -> bool:
    r"""Return whether a string in a value has characters that JSON writes as ``\u0003``."""
    if isinstance(value, str):
        return _CONTROLS.search(value) is not None
    if isinstance(value, Mapping):
        return any(map(has_controls, value.values()))
    return isinstance(value, list) and any(map(has_controls, value))


def plain_value(value: Any) -> Any:
    """Return an equal JSON value in which floats such as ``1.0`` are integers."""
    if isinstance(value, Mapping):
        return {name: plain_value(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain_value(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def has_type(value: Any, types: Collection[str]) -> bool:
    """Return whether a JSON value has one of the types of JSON schemas, such as ``"integer"``."""
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, (int, float)):
        is_integer = isinstance(value, int) or value.is_integer()
        return "number" in types or (is_integer and "integer" in types)
    if isinstance(value, str):
        return "string" in types
    return ("array" if isinstance(value, list) else "object") in types


def digits_of(value: float) -> int:
    """Return the digits of a ``multipleOf`` value as an integer: 25 for 0.25.

    The result is 0 if llguidance would round the value.
    """
    scaled = float(value)
    places = 0
    while scaled != int(scaled):  # as llguidance converts the value
        scaled *= 10
        places += 1
    found = int(scaled)
    while places and not found % 10:
        found //= 10
        places -= 1
    return found if found < 2**32 and found / 10**places == value else 0
