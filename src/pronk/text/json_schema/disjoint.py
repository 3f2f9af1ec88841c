"""Disjointness of translated schemas: if no value matches two alternatives, oneOf means anyOf."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, product
from typing import Any

_MAX_DEPTH = 8  # maximum number of nested levels that are compared
_MAX_COMPARISONS = 10_000


def are_disjoint(options: Sequence[Any], definitions: Mapping[str, Any]) -> bool:
    """Return whether it is proved that no value matches two of the schemas ``options``.

    ``definitions`` are the schemas to which ``#/$defs/…`` refers, by their names. False means that
    no proof was found.
    """
    comparison = _Comparison(definitions)
    return all(comparison.differ(one, other) for one, other in combinations(options, 2))


class _Comparison:
    """Comparison of pairs of schemas that refer to the same definitions.

    After ``_MAX_COMPARISONS`` pairs, all further pairs count as overlapping, to limit the time.
    """

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._left = _MAX_COMPARISONS

    def differ(self, one: Any, other: Any, depth: int = _MAX_DEPTH) -> bool:
        """Return whether it is proved that no value matches both schemas.

        ``depth`` is the number of nested levels that are still compared.
        """
        self._left -= 1
        if one is False or other is False:
            return True
        if one is True or other is True or not depth or self._left < 0:
            return False
        for first, second in ((one, other), (other, one)):
            conjuncts = _conjuncts(first, self._definitions)
            if any(self.differ(each, second, depth - 1) for each in conjuncts):
                return True
            options = first.get("anyOf")
            if options and all(self.differ(each, second, depth - 1) for each in options):
                return True
        return (
            _types_differ(one, other)
            or _values_differ(one, other)
            or self._members_differ(one, other, depth)
        )

    def _members_differ(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Return whether both schemas are of objects with a required property that always differs.

        The property differs if no value matches its schemas in both.
        """
        if {*_types(one), *_types(other)} != {"object"}:
            return False
        for name in sorted({*one.get("required", []), *other.get("required", [])}):
            if self.differ(_member(one, name), _member(other, name), depth - 1):
                return True
        return False


def _conjuncts(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a schema that all its values match: those of ``allOf`` and ``$ref``."""
    found = [*schema.get("allOf", [])]
    if "$ref" in schema:
        found.append(definitions[schema["$ref"].removeprefix("#/$defs/")])
    return found


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists by ``const`` or ``enum``; ``None`` if it lists none."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types(schema: Mapping[str, Any]) -> Collection[str]:
    """Return the types of a schema's values, with ``number`` in place of ``integer``."""
    values = _values(schema)
    if values is not None:
        return {_type_of(value) for value in values}
    types = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    names = [types] if isinstance(types, str) else types
    return {"number" if name == "integer" else name for name in names}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _types_differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return not {*_types(one)} & {*_types(other)}


def _values_differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether both schemas list their values, and no value is in both lists."""
    these = _values(one)
    those = _values(other)
    if these is None or those is None:
        return False
    for this, that in product(these, those):
        if this == that and _type_of(this) == _type_of(that):
            return False
    return True


def _member(schema: Mapping[str, Any], name: str) -> Any:
    """Return a schema that every value of the property ``name`` matches.

    The schema may match further values.
    """
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return schema.get("properties", {}).get(name, not is_closed)
