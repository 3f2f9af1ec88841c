"""Translation of the keywords that constrain numbers, strings, and the number of elements."""

from __future__ import annotations

from math import lcm
from typing import Any

from pronk.text.json_schema.findings import Findings, Keywords
from pronk.text.json_schema.formats import FORMATS, NOT_ENFORCED
from pronk.text.json_schema.patterns import to_rust
from pronk.text.json_schema.references import Path
from pronk.text.json_schema.values import (
    MAX_EXACT,
    MAX_INTEGER,
    digits_of,
    is_exact,
    is_number,
    without_integer_bounds,
)

# Maximum common multiple of the digits of all ``multipleOf`` values in a grammar (25 for 0.25),
# because llguidance's automaton has as many states.
MAX_MULTIPLE = 10_000
# largest value of minItems, maxLength, … with which llguidance accepts every grammar
_MAX_SAFE_COUNT = 256


def translate_numbers(keywords: Keywords, *, integers_only: bool) -> dict[str, Any]:
    """Return the translated keywords for numbers: bounds and ``multipleOf``.

    ``integers_only``: whether the schema allows integers only.
    """
    bounds = _bounds(keywords, MAX_INTEGER if integers_only else MAX_EXACT)
    lower = [bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds]
    upper = [bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds]
    if lower and upper:
        lowest = max(lower)
        highest = min(upper)
        keywords.findings.is_risky |= highest - lowest <= 1
        if not integers_only and lowest < highest:
            bounds = without_integer_bounds(bounds, lowest, highest)
    return bounds | _multiple_of(keywords)


def _bounds(keywords: Keywords, limit: int) -> dict[str, Any]:
    """Return the bounds of numbers, such as ``minimum``, that llguidance reads exactly.

    These are bounds whose absolute value is at most ``limit``; others are recorded as faults.
    """
    given = keywords.given
    found = dict[str, Any]()
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if key not in given:
            continue
        value = given[key]
        if isinstance(value, bool) and key.startswith("exclusive"):
            continue  # in draft 4, exclusiveMinimum is a flag of minimum; see below
        if not is_number(value):
            keywords.add_fault(key, "a number", value)
        elif not is_exact(value, limit):
            keywords.add_fault(key, "a number with at most 15 digits", value)
        else:
            found[key] = value
    for name in ("Minimum", "Maximum"):
        exclusive = f"exclusive{name}"
        inclusive = name.lower()
        if given.get(exclusive) is True and inclusive in found:
            found[exclusive] = found.pop(inclusive)
    return found


def _multiple_of(keywords: Keywords) -> dict[str, Any]:
    """Return ``multipleOf``, unless it is missing or llguidance cannot follow it."""
    if "multipleOf" not in keywords.given:
        return {}
    value = keywords.given["multipleOf"]
    if not is_number(value) or value <= 0 or not is_exact(value, MAX_EXACT):
        keywords.add_fault("multipleOf", "a number above 0 with at most 15 digits", value)
        return {}
    findings = keywords.findings
    digits = digits_of(value)
    multiple = lcm(findings.multiple, digits)
    if not digits or multiple > MAX_MULTIPLE:
        expected = f"digits whose common multiple with others is at most {MAX_MULTIPLE}"
        keywords.add_fault("multipleOf", expected, value)
        return {}
    findings.multiple = multiple
    findings.is_risky = True
    return {"multipleOf": value}


def translate_counts(keywords: Keywords, least: str, most: str) -> dict[str, Any]:
    """Return the keywords ``least`` and ``most`` with their values, such as ``minLength: 1``.

    The values must be whole numbers; others are recorded as faults.
    """
    findings = keywords.findings
    found = dict[str, Any]()
    for key in (least, most):
        if key not in keywords.given:
            continue
        value = keywords.given[key]
        if not is_number(value) or value < 0 or value != int(value):
            keywords.add_fault(key, "an integer of at least 0", value)
        elif key == most or value > 0:
            found[key] = int(value)
            findings.is_risky |= value > _MAX_SAFE_COUNT
    findings.is_risky |= least in found and most in found and found[least] > found[most]
    return found


def string_patterns(keywords: Keywords) -> list[str]:
    """Return expressions for ``pattern`` and ``format``; a string must match all of them."""
    given = keywords.given
    found = list[str]()
    if "pattern" in given:
        pattern = translate_pattern(
            given["pattern"], (*keywords.path, "pattern"), keywords.findings
        )
        found += [pattern] if pattern else []  # every string matches the empty expression
    name = given.get("format")
    if not isinstance(name, str):
        if "format" in given:
            keywords.add_fault("format", "the name of a format", name)
    elif name in FORMATS:
        found += FORMATS[name]
    elif name in NOT_ENFORCED:
        expected = f"one of {', '.join(FORMATS)}"
        keywords.add_fault("format", expected, name, is_annotation=True)
    has_length = "minLength" in given or "maxLength" in given
    keywords.findings.is_risky |= len(found) > 1 or (bool(found) and has_length)
    return found


def translate_pattern(pattern: Any, path: Path, findings: Findings) -> str | None:
    """Return the translation of a regular expression to Rust's syntax.

    ``None`` if it has no translation, which is recorded as a fault at ``path``.
    """
    findings.is_risky = True
    if not isinstance(pattern, str):
        findings.add_fault(path, "a regular expression", pattern)
        return None
    try:
        return to_rust(pattern)
    except ValueError as error:
        findings.add_fault(path, str(error), pattern)
        return None
