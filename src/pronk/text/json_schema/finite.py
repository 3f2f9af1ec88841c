"""Detection of schemas that no finite text matches.

An example is an object with a required property whose schema is that of the object itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Maximum number of passes over all definitions in search of finite ones. If more would be needed,
# the schema counts as one that no finite text matches.
_MAX_PASSES = 20


def is_finite(schema: Any) -> bool:
    """Return whether some finite text matches a translated schema.

    Otherwise every text would have to follow a circle of references without end.
    """
    if not isinstance(schema, Mapping):
        return True
    definitions = schema.get("$defs", {})
    names = [*definitions]
    finite = set[str]()
    for _ in range(_MAX_PASSES):
        known = len(finite)
        names.reverse()  # a definition usually refers to later ones, so these are checked first
        for name in names:
            if name not in finite and _ends(definitions[name], finite):
                finite.add(name)
        if len(finite) == known:
            return _ends(schema, finite)
    return False


def _ends(schema: Any, finite: set[str]) -> bool:
    """Return whether some finite text matches a schema.

    ``finite`` are the names of the definitions for which this is already known.
    """
    if not isinstance(schema, Mapping):
        return True
    is_known = "$ref" not in schema or schema["$ref"].removeprefix("#/$defs/") in finite
    if not is_known or not all(_ends(each, finite) for each in schema.get("allOf", [])):
        return False
    options = schema.get("anyOf")
    if options is not None and not any(_ends(each, finite) for each in options):
        return False
    types = schema.get("type", "null")
    names = {types} if isinstance(types, str) else {*types}
    if not names.isdisjoint({"null", "boolean", "number", "integer", "string"}):
        return True
    if "object" in names and _object_ends(schema, finite):
        return True
    return "array" in names and _array_ends(schema, finite)


def _object_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    properties = schema.get("properties", {})
    return all(_ends(properties.get(name), finite) for name in schema.get("required", []))


def _array_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    least = schema.get("minItems", 0)
    prefix = schema.get("prefixItems", [])[:least]
    rest = [schema.get("items")] if least > len(prefix) else []
    return all(_ends(item, finite) for item in [*prefix, *rest])
