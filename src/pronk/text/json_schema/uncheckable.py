"""Keywords that llguidance cannot follow, because it reads a text from left to right."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pronk.text.json_schema.findings import Keywords

_EXPECTED = "keywords that can be checked from left to right"
# For each keyword: the type of the values that it constrains (empty for all types), and the values
# of the keyword that constrain nothing, so that it may be ignored.
_NOT_CHECKABLE: Mapping[str, tuple[str, Sequence[Any]]] = {
    "not": ("", [False]),
    "uniqueItems": ("array", [False]),
    "unevaluatedItems": ("array", [True, {}]),
    "dependentRequired": ("object", [{}]),
    "dependentSchemas": ("object", [{}]),
    "dependencies": ("object", [{}]),
    "unevaluatedProperties": ("object", [True, {}]),
    "$dynamicRef": ("", []),
    "$recursiveRef": ("", []),
}
_CONSTRAIN_STRINGS = frozenset(
    "minLength maxLength pattern format const enum allOf anyOf oneOf not if $ref $dynamicRef "
    "$recursiveRef".split()
)


def leave_out_uncheckable(keywords: Keywords, types: Collection[str]) -> None:
    """Record a fault for each keyword that llguidance cannot follow and that has an effect.

    ``types`` are the types of values that the schema allows.
    """
    given = keywords.given
    found = list[str]()
    for keyword, (kind, nothing) in _NOT_CHECKABLE.items():
        if keyword not in given or (kind and kind not in types):
            continue
        value = given[keyword]
        if not any(type(each) is type(value) and each == value for each in nothing):
            found.append(keyword)
    if "if" in given and ("then" in given or "else" in given):
        found += ["if", "then", "else"]
    if "contains" in given and "array" in types:
        least = given.get("minContains", 1)
        if least != 0 or "maxContains" in given:
            found += ["contains", "minContains", "maxContains"]
    names = given.get("propertyNames", True)
    if "object" in types and not _allows_names(names):
        found.append("propertyNames")
    for keyword in found:
        if keyword in given:
            keywords.add_fault(keyword, _EXPECTED)


def _allows_names(schema: Any) -> bool:
    """Return whether a schema of ``propertyNames`` allows every name."""
    if not isinstance(schema, Mapping):
        return schema is True
    types = schema.get("type", "string")
    has_strings = types == "string" or (isinstance(types, list) and "string" in types)
    return has_strings and _CONSTRAIN_STRINGS.isdisjoint(schema)
