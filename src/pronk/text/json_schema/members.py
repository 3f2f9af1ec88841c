r"""Translation of the keywords that constrain the elements of arrays and the properties of objects.

The difficulty is ``additionalProperties``. llguidance's grammar of the names of additional
properties allows escapes of letters, so that ``"\u0061"`` would pass for a name other than ``"a"``.
There are two remedies:

- ``patternProperties`` with an expression for all other names replaces ``additionalProperties``.
  llguidance cannot intersect objects with such expressions.
- Therefore, if a schema intersects objects with additional properties, the grammar excludes all
  escapes of this form from all strings, those of control characters too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pronk.text.json_schema.findings import Keywords
from pronk.text.json_schema.patterns import other_than
from pronk.text.json_schema.references import SchemaPart
from pronk.text.json_schema.scalars import translate_counts, translate_pattern

Schema = dict[str, Any] | bool

# Callback ``translate(part)``: returns the translation of a schema within another one.
Translate = Callable[[SchemaPart], Schema]

# Maximum number of optional properties of an object. llguidance's parser needs several items for
# each.
_MAX_OPTIONAL = 400

# Maximum characters of a property's name in an expression that matches all other names. The
# expression nests a group for each character.
_MAX_NAME_IN_PATTERN = 40


def translate_array(keywords: Keywords, translate: Translate) -> dict[str, Any]:
    """Return the translated keywords that constrain arrays."""
    given = keywords.given
    found = translate_counts(keywords, "minItems", "maxItems")
    # before draft 2020-12, ``items`` may be a list of schemas
    in_list = isinstance(keywords.schema.get("items"), list)
    first = "items" if in_list else "prefixItems"
    rest = "additionalItems" if in_list else "items"
    prefix = given.get(first, [])
    is_complete = isinstance(prefix, list) and not keywords.is_left_out(first)
    if not isinstance(prefix, list):
        keywords.add_fault(first, "a list of schemas", prefix)
    elif prefix:
        found["prefixItems"] = translate_list(keywords.part(first), translate)
    if rest in given and is_complete:
        found["items"] = translate(keywords.part(rest))
    elif rest in given and given[rest] is not True:
        keywords.add_fault(rest, f"it together with {first!r}")
    return found


def translate_list(schemas: SchemaPart, translate: Translate) -> list[Schema]:
    """Return the translations of a list of schemas."""
    translated = list[Schema]()
    for place, schema in enumerate(schemas.schema):
        part = SchemaPart(schema, (*schemas.path, str(place)), schemas.base)
        translated.append(translate(part))
    return translated


def translate_object(
    keywords: Keywords, translate: Translate, *, names_by_pattern: bool
) -> dict[str, Any]:
    """Return the translated keywords that constrain objects.

    ``names_by_pattern`` selects the remedy for the names of additional properties; see above.
    """
    properties = _schemas(keywords, "properties", translate)
    patterned, has_all_patterns = _schemas_by_pattern(keywords, translate)
    required = _required(keywords)
    if properties is not None and len({*properties} - {*required}) > _MAX_OPTIONAL:
        expected = f"at most {_MAX_OPTIONAL} that are not required"
        keywords.add_fault("properties", expected, len(properties))
        properties = None
    named = properties or {}
    has_all_names = properties is not None and not keywords.is_left_out("properties")
    others = _others(keywords, translate, is_known=has_all_names and has_all_patterns)
    if others is False and not patterned:
        unknown = [name for name in required if name not in named]
        if unknown:
            expected = "names of properties, as there are no others"
            keywords.add_fault("required", expected, unknown[0])
        required = [name for name in required if name in named]
    found = _number_of_properties(keywords, len(required))
    if required:
        found["required"] = required
    return found | _join_members(
        keywords, named, patterned, others, required, names_by_pattern=names_by_pattern
    )


def _schemas(keywords: Keywords, keyword: str, translate: Translate) -> dict[str, Schema] | None:
    """Return the translated value of a keyword that maps names to schemas: ``properties``, ….

    The result is ``None`` if the value is not a mapping.
    """
    value = keywords.given.get(keyword, {})
    if not isinstance(value, Mapping):
        keywords.add_fault(keyword, "an object whose values are schemas", value)
        return None
    return {name: translate(keywords.part(keyword, name)) for name in value}


def _schemas_by_pattern(keywords: Keywords, translate: Translate) -> tuple[dict[str, Schema], bool]:
    """Return the translated ``patternProperties``, and whether none of them is left out.

    The keys are regular expressions in Rust's syntax.
    """
    schemas = _schemas(keywords, "patternProperties", translate)
    is_complete = schemas is not None and not keywords.is_left_out("patternProperties")
    found = dict[str, Schema]()
    for name, schema in (schemas or {}).items():
        path = (*keywords.path, "patternProperties", name)
        pattern = translate_pattern(name, path, keywords.findings)
        if pattern is None:
            is_complete = False
        else:
            found[pattern] = schema
    return found, is_complete


def _required(keywords: Keywords) -> list[str]:
    """Return the names of required properties, each once."""
    names = keywords.given.get("required", [])
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return [*dict.fromkeys(names)]
    keywords.add_fault("required", "a list of names", names)
    return []


def _others(keywords: Keywords, translate: Translate, *, is_known: bool) -> Schema:
    """Return the schema of ``additionalProperties``.

    ``is_known`` is whether no other keyword that names properties is left out. Otherwise it is not
    known which properties are additional ones, and all values are allowed.
    """
    schema = keywords.given.get("additionalProperties", True)
    if schema is True:
        return True
    if not is_known:
        expected = "it together with 'properties' and 'patternProperties'"
        keywords.add_fault("additionalProperties", expected)
        return True
    # llguidance accepts ``false`` here; in other places such a schema needs a trial compilation
    return False if schema is False else translate(keywords.part("additionalProperties"))


def _number_of_properties(keywords: Keywords, num_required: int) -> dict[str, Any]:
    """Return ``minProperties`` and ``maxProperties`` of an object."""
    found = translate_counts(keywords, "minProperties", "maxProperties")
    keywords.findings.is_risky |= bool(found)
    least = found.get("minProperties", 0)
    if least <= num_required:
        found.pop("minProperties", None)
    elif least > 1:
        # A text may have a name twice, and the grammar would count it as two properties.
        expected = "at most 1, or the number of required properties"
        keywords.add_fault("minProperties", expected, keywords.given["minProperties"])
        del found["minProperties"]
    return found


def _join_members(
    keywords: Keywords,
    named: dict[str, Schema],
    patterned: dict[str, Schema],
    others: Schema,
    required: Sequence[str],
    *,
    names_by_pattern: bool,
) -> dict[str, Any]:
    """Return ``properties``, ``patternProperties`` and ``additionalProperties`` of an object.

    Args:
        keywords: keywords of the object, whose findings are updated.
        named: schemas of properties by name.
        patterned: schemas of properties by a regular expression of their names.
        others: schema of all other properties.
        required: names of required properties.
        names_by_pattern: as in :func:`translate_object`.
    """
    findings = keywords.findings
    findings.is_risky |= bool(patterned)
    names = {*named, *required}
    if others is not False and (names or patterned):
        has_long_name = any(len(name) > _MAX_NAME_IN_PATTERN for name in names)
        needs_few_escapes = bool(patterned) or has_long_name
        findings.has_open_names = True
        findings.has_intersections |= needs_few_escapes
        if names_by_pattern and not needs_few_escapes:
            named |= {name: others for name in required if name not in named}
            patterned = {other_than(names): others}
            others = False
    found = dict[str, Any]()
    if named:
        found["properties"] = named
    if patterned:
        found["patternProperties"] = patterned
    if others is not True:
        found["additionalProperties"] = others
    return found
