"""Schemas without a text that ends: a required property that refers to its own object, for example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_PASSES = 20  # over all definitions; a schema that needs more counts as one without an end


def is_finite(schema: Any) -> bool:
    """Return whether a translated schema has no circle of references that every text has to follow."""
    if not isinstance(schema, Mapping):
        return True
    definitions = schema.get("$defs", {})
    names = [*definitions]
    finite = set[str]()
    for _ in range(_MAX_PASSES):
        known = len(finite)
        names.reverse()  # a definition usually needs those after it
        for name in names:
            if name not in finite and _ends(definitions[name], finite):
                finite.add(name)
        if len(finite) == known:
            return _ends(schema, finite)
    return False


def _ends(schema: Any, finite: set[str]) -> bool:
    """Return whether some text ends, given the names of definitions for which this is known."""
    if not isinstance(schema, Mapping):
        return True
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in finite:
        return False
    if not all(_ends(each, finite) for each in schema.get("allOf", [])):
        return False
    options = schema.get("anyOf")
    if options is not None and not any(_ends(each, finite) for each in options):
        return False
    types = schema.get("type", "null")
    simple = {"null", "boolean", "number", "integer", "string"} & {
        *([types] if isinstance(types, str) else types)
    }
    return (
        bool(simple)
        or ("object" in types and _object_ends(schema, finite))
        or ("array" in types and _array_ends(schema, finite))
    )


def _object_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    properties = schema.get("properties", {})
    return all(_ends(properties.get(name), finite) for name in schema.get("required", []))


def _array_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    least = schema.get("minItems", 0)
    prefix = schema.get("prefixItems", [])[:least]
    rest = [schema.get("items")] if least > len(prefix) else []
    return all(_ends(item, finite) for item in [*prefix, *rest])
