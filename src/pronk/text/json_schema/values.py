"""Numbers and values in schemas, as llguidance reads them: as floating-point numbers of 64 bits."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import inf, isfinite, nextafter
from typing import Any

MAX_EXACT = 2**53  # integers up to this bound are exact as floating-point numbers
MAX_INTEGER = 2**63 - 1
# without those that have short escapes, such as \n
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def without_integer_bounds(
    bounds: Mapping[str, Any], lowest: float, highest: float
) -> dict[str, Any]:
    """Replace exclusive bounds that llguidance's grammar of numbers includes.

    Such a bound is an integer, and no other integer is between the bounds: 0 in 0 < x < 0.5, for
    example. The next floating-point number replaces it.
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
    return max(nextafter(value, inf), 1e-30)  # fewer digits than the number next to 0


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def is_exact(value: float, limit: int) -> bool:
    """Return whether llguidance, which reads floating-point numbers, uses the exact value."""
    if abs(value) > limit:
        return False
    # llguidance's conversion to an integer of 64 bits saturates.
    return isinstance(value, float) or min(int(float(value)), MAX_INTEGER) == value


def is_exact_value(value: Any) -> bool:
    """Return whether all numbers in a value of ``enum`` are exact."""
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
    """Return an equal value without ``1.0``, which is written ``1``."""
    if isinstance(value, Mapping):
        return {name: plain_value(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain_value(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def has_type(value: Any, types: Collection[str]) -> bool:
    """Return whether a value of JSON has one of the types."""
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, (int, float)):
        is_integer = isinstance(value, int) or value.is_integer()
        return "number" in types or (is_integer and "integer" in types)
    return (
        "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    ) in types


def digits_of(value: float) -> int:
    """Return ``multipleOf`` without its decimal point (0.25: 25), or 0 if llguidance rounds it."""
    scaled = float(value)
    places = 0
    while scaled != int(scaled):  # as llguidance does it
        scaled *= 10
        places += 1
    found = int(scaled)
    while places and not found % 10:
        found //= 10
        places -= 1
    return found if found < 2**32 and found / 10**places == value else 0
