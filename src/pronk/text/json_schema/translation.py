"""Translation of a JSON schema of any draft to the keywords that llguidance follows exactly.

The result has no annotations and no ``$id``; its references are ``#/$defs/d0``, ``#/$defs/d1``, ….
A keyword without an exact counterpart becomes a :class:`Fault` and is left out. Leaving a keyword
out never forbids a value: keywords that depend on it, as ``additionalProperties`` depends on
``properties``, are left out, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from pronk.text.json_schema.disjoint import are_disjoint
from pronk.text.json_schema.formats import FORMATS, NOT_ENFORCED
from pronk.text.json_schema.patterns import other_than, to_rust
from pronk.text.json_schema.references import (
    MAPS_OF_SCHEMAS,
    Path,
    References,
    SchemaPart,
    base_within,
)
from pronk.text.json_schema.values import (
    MAX_EXACT,
    MAX_INTEGER,
    digits_of,
    has_controls,
    has_type,
    is_exact,
    is_exact_value,
    is_number,
    plain_value,
    without_integer_bounds,
)

Schema = dict[str, Any] | bool
# Keywords of a JSON schema, with their values; those that the translation leaves out are missing.
Given = Mapping[str, Any]

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
_NUMBERS = frozenset({"number", "integer"})

_MAX_DEPTH = 64  # maximum number of keys and indices between the root and a schema
# Maximum common multiple of the digits of all ``multipleOf`` values in a grammar (25 for 0.25),
# because llguidance's automaton has as many states.
MAX_MULTIPLE = 10_000
# largest value of minItems, maxLength, … with which llguidance accepts every grammar
_MAX_SAFE_COUNT = 256
_MAX_SAFE_REFERENCES = 64  # number of definitions up to which no chain of references is too long

LEFT_TO_RIGHT = "keywords that can be checked from left to right"
_SMALLER = "a schema that is simpler, and that some value matches"
# Keywords that llguidance cannot follow. For each: the type of the values that it constrains (empty
# for all types), and the values of the keyword that constrain nothing, so that it may be ignored.
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
_LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
# Keywords that constrain the value of the schema itself, not its elements or properties.
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "const", "enum")
# Keywords whose values contain schemas, except those for definitions.
_PARTS = (
    "properties", "patternProperties", "additionalProperties", "prefixItems", "items",
    "additionalItems", "allOf", "anyOf", "oneOf",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """Keyword or schema that the translation leaves out.

    Attributes:
        path: path of the keyword or of the schema.
        expected: what the keyword should be for the translation to keep it, for an error message.
        found: value of the keyword; empty if the translation keeps no value of the keyword.
        is_annotation: whether the standard lets a validator ignore the keyword, as it does
            ``format``.
    """

    path: Path
    expected: str
    found: str = ""
    is_annotation: bool = False


@dataclass(frozen=True)
class TranslatedSchema:
    r"""Result of a translation.

    Attributes:
        schema: the translated schema.
        faults: the keywords and schemas that were left out.
        is_risky: whether llguidance may refuse the schema, so that a trial compilation is needed.
        has_control_escapes: whether strings may have escapes such as ``\u0003``.
        multiple: least common multiple of the digits of all ``multipleOf`` values (25 for 0.25).
    """

    schema: Schema
    faults: Sequence[Fault]
    is_risky: bool
    has_control_escapes: bool
    multiple: int


def translate(
    root: SchemaPart, references: References, left_out: Collection[Path], multiple: int = 1
) -> TranslatedSchema:
    """Translate a schema with the definitions that it refers to.

    Args:
        root: the schema, which may be a part of a larger schema.
        references: resolver of the references within the larger schema.
        left_out: paths of further keywords and schemas to leave out.
        multiple: :attr:`TranslatedSchema.multiple` of the earlier schemas in the same grammar.
    """
    translator = _Translator(references, left_out, multiple, names_by_pattern=True)
    translation = translator.run(root)
    if translation.has_control_escapes:
        return translation
    return _Translator(references, left_out, multiple, names_by_pattern=False).run(root)


def referenced(
    root: SchemaPart, references: References, left_out: Collection[Path]
) -> Sequence[SchemaPart]:
    """Return the targets of all references in a schema, and of the references in these targets.

    ``left_out`` are paths of keywords and schemas to leave out.
    """
    translator = _Translator(references, left_out, 1, names_by_pattern=True)
    translator.run(root)
    return translator.targets


def parts(target: SchemaPart) -> Iterator[SchemaPart]:
    """Yield the schemas that are directly within a schema, except its definitions."""
    if not isinstance(target.schema, Mapping):
        return
    base = base_within(target.schema, target.base)
    for keyword in _PARTS:
        value = target.schema.get(keyword)
        path = (*target.path, keyword)
        if keyword in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            for name, inner in value.items():
                yield SchemaPart(inner, (*path, name), base)
        elif keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
            for place, inner in enumerate(value):
                yield SchemaPart(inner, (*path, str(place)), base)
        elif isinstance(value, Mapping):
            yield SchemaPart(value, path, base)


# Maximum number of optional properties of an object. llguidance's parser needs several items for
# each.
_MAX_OPTIONAL = 400

# Maximum characters of a property's name in an expression that matches all other names. The
# expression nests a group for each character.
_MAX_NAME_IN_PATTERN = 40


class _Translator:
    r"""Translator of one schema with its definitions.

    The difficulty is ``additionalProperties``. llguidance's grammar of the names of additional
    properties allows escapes of letters, so that ``"\u0061"`` would pass for a name other than
    ``"a"``. There are two remedies:

    - If ``names_by_pattern``, ``patternProperties`` with an expression for all other names replaces
      ``additionalProperties``. llguidance cannot intersect objects with such expressions.
    - Therefore, if a schema intersects objects with additional properties, the grammar excludes all
      escapes of this form from all strings, those of control characters too.
    """

    def __init__(
        self,
        references: References,
        left_out: Collection[Path],
        multiple: int,
        *,
        names_by_pattern: bool,
    ) -> None:
        # targets of references so far, in the order in which they were found
        self.targets = list[SchemaPart]()
        self._references = references
        self._left_out = left_out
        self._multiple = multiple
        self._names_by_pattern = names_by_pattern
        # name of the definition of each target, by the target's path
        self._names = dict[Path, str]()
        self._faults = dict[Fault, None]()  # an ordered set
        # path of each oneOf, and its translated schemas
        self._alternatives = list[tuple[Path, list[Schema]]]()
        self._is_risky = False
        self._has_open_names = False  # whether an object has both named and additional properties
        # whether a value must match several schemas of objects at once
        self._has_intersections = False

    def run(self, root: SchemaPart) -> TranslatedSchema:
        """Return the translation of a schema, with the definitions to which it refers."""
        schema = self._translate(root.schema, root.path, root.base)
        definitions = dict[str, Schema]()
        # translating a definition may append further targets to this list
        for target in self.targets:
            name = self._names[target.path]
            definitions[name] = self._translate(target.schema, target.path, target.base)
        for path, options in self._alternatives:
            if not are_disjoint(options, definitions):
                self._fault(path, "alternatives of which no value matches two, or 'anyOf'")
        if definitions and not isinstance(schema, bool):
            schema["$defs"] = definitions
        has_control_escapes = not (self._has_open_names and self._has_intersections)
        return TranslatedSchema(
            schema, tuple(self._faults), self._is_risky, has_control_escapes, self._multiple
        )

    def _fault(
        self, path: Path, expected: str, *found: object, is_annotation: bool = False
    ) -> None:
        """Record a keyword or schema that is left out.

        ``found`` is the value of the keyword, unless no value of it is supported.
        """
        shown = "".join(f"{value!r:.60}" for value in found)
        self._faults[Fault(path, expected, shown, is_annotation)] = None

    def _translate(self, schema: Any, path: Path, base: str) -> Schema:
        """Return the translation of a schema at a path.

        A schema that is left out is recorded as a fault and becomes True, which allows any value.
        ``base`` is the URI against which relative references in the schema are resolved.
        """
        if path in self._left_out:
            self._fault(path, _SMALLER, schema)
            return True
        if len(path) > _MAX_DEPTH:
            self._fault(path, f"a schema of at most {_MAX_DEPTH} levels", schema)
            return True
        if isinstance(schema, bool):
            self._is_risky |= not schema
            return schema
        if not isinstance(schema, Mapping):
            self._fault(path, "a schema, an object or true", schema)
            return True
        return self._translate_object(schema, path, base_within(schema, base))

    def _translate_all(self, schemas: Sequence[Any], path: Path, base: str) -> list[Schema]:
        """Return the translations of a list of schemas, whose path is ``path``."""
        translated = list[Schema]()
        for place, schema in enumerate(schemas):
            translated.append(self._translate(schema, (*path, str(place)), base))
        return translated

    def _translate_object(self, schema: Given, path: Path, base: str) -> Schema:
        given = {key: value for key, value in schema.items() if (*path, key) not in self._left_out}
        for key in schema:
            if key not in given:
                self._fault((*path, key), _SMALLER)
        types = self._types(given, path)
        self._leave_out_not_checkable(given, types, path)
        plain, further = self._plain(schema, given, types, path, base)
        # In llguidance's grammar, the properties of an object have the order of the keywords that
        # name them: ``properties``, ``allOf``, ``$ref``. Therefore the keywords keep their order.
        result = {} if "properties" in given else plain.copy()
        in_place = dict[str, Any]()
        for key in given:
            if key == "properties":
                result |= plain
            elif key in _IN_PLACE:
                for keyword, value in self._in_place(given, key, types, path, base).items():
                    if keyword in in_place:
                        further.append({keyword: value})
                    else:
                        in_place[keyword] = value
                        result[keyword] = value
        if further:
            result["allOf"] = [*result.get("allOf", []), *further]
        self._is_risky |= "allOf" in result or (bool(in_place) and len(in_place) + len(plain) > 1)
        num_constraints = len(in_place) + len(result.get("allOf", [])[1:])
        num_constraints += bool({*plain} - {"type"})
        has_schemas = not {"allOf", "anyOf", "$ref"}.isdisjoint(in_place)
        self._has_intersections |= num_constraints > 1 and has_schemas
        return result or True

    def _plain(
        self, schema: Given, given: Given, types: Sequence[str], path: Path, base: str
    ) -> tuple[dict[str, Any], list[Schema]]:
        """Return the translated keywords that constrain values of one type, such as ``maxLength``.

        The second result is a list of further schemas that a value must match as well: a schema can
        have only one regular expression, so others need a schema each.
        """
        plain = dict[str, Any]()
        patterns = list[str]()
        if types != TYPES:
            plain["type"] = types[0] if len(types) == 1 else [*types]
        if not _NUMBERS.isdisjoint(types):
            plain |= self._numbers(given, path, integers_only="number" not in types)
        if "string" in types:
            patterns = self._patterns(given, path)
            plain |= self._counts(given, path, "minLength", "maxLength")
        if patterns:
            plain["pattern"] = patterns[0]
        if "array" in types:
            plain |= self._array(schema, given, path, base)
        if "object" in types:
            plain |= self._object(schema, given, path, base)
        return plain, [{"pattern": pattern} for pattern in patterns[1:]]

    def _types(self, given: Given, path: Path) -> tuple[str, ...]:
        """Return the types of values that ``type`` allows; all types without that keyword."""
        value = given.get("type", [*TYPES])
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or any(name not in TYPES for name in names):
            self._fault((*path, "type"), f"one or several of {', '.join(TYPES)}", value)
            return TYPES
        return tuple(dict.fromkeys(names)) if "type" in given else TYPES

    def _numbers(self, given: Given, path: Path, *, integers_only: bool) -> dict[str, Any]:
        """Return the keywords for numbers: bounds and ``multipleOf``."""
        bounds = self._bounds(given, path, MAX_INTEGER if integers_only else MAX_EXACT)
        lower = [bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds]
        upper = [bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds]
        lowest = max(lower, default=None)
        highest = min(upper, default=None)
        if lowest is not None and highest is not None:
            self._is_risky |= highest - lowest <= 1
            if not integers_only and lowest < highest:
                bounds = without_integer_bounds(bounds, lowest, highest)
        if "multipleOf" in given:
            bounds |= self._multiple_of(given["multipleOf"], (*path, "multipleOf"))
        return bounds

    def _bounds(self, given: Given, path: Path, limit: int) -> dict[str, Any]:
        """Return the bounds of numbers, such as ``minimum``, that llguidance reads exactly.

        These are bounds whose absolute value is at most ``limit``; others are recorded as faults.
        """
        found = dict[str, Any]()
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if key not in given:
                continue
            value = given[key]
            if isinstance(value, bool) and key.startswith("exclusive"):
                continue  # in draft 4, exclusiveMinimum is a flag of minimum; see below
            if not is_number(value):
                self._fault((*path, key), "a number", value)
            elif not is_exact(value, limit):
                self._fault((*path, key), "a number with at most 15 digits", value)
            else:
                found[key] = value
        for name in ("Minimum", "Maximum"):
            exclusive = f"exclusive{name}"
            inclusive = name.lower()
            if given.get(exclusive) is True and inclusive in found:
                found[exclusive] = found.pop(inclusive)
        return found

    def _multiple_of(self, value: Any, path: Path) -> dict[str, Any]:
        if not is_number(value) or value <= 0 or not is_exact(value, MAX_EXACT):
            self._fault(path, "a number above 0 with at most 15 digits", value)
            return {}
        digits = digits_of(value)
        multiple = lcm(self._multiple, digits)
        if not digits or multiple > MAX_MULTIPLE:
            self._fault(
                path, f"digits whose common multiple with others is at most {MAX_MULTIPLE}", value
            )
            return {}
        self._multiple = multiple
        self._is_risky = True
        return {"multipleOf": value}

    def _counts(self, given: Given, path: Path, least: str, most: str) -> dict[str, Any]:
        """Return the keywords ``least`` and ``most`` with their values, such as ``minLength: 1``.

        The values must be whole numbers; others are recorded as faults.
        """
        found = dict[str, Any]()
        for key in (least, most):
            if key not in given:
                continue
            value = given[key]
            if not is_number(value) or value < 0 or value != int(value):
                self._fault((*path, key), "an integer of at least 0", value)
            elif key == most or value > 0:
                found[key] = int(value)
                self._is_risky |= value > _MAX_SAFE_COUNT
        self._is_risky |= least in found and most in found and found[least] > found[most]
        return found

    def _patterns(self, given: Given, path: Path) -> list[str]:
        """Return expressions for ``pattern`` and ``format``; a string must match all of them."""
        found = list[str]()
        if "pattern" in given:
            pattern = self._pattern(given["pattern"], (*path, "pattern"))
            found += [pattern] if pattern else []
        name = given.get("format")
        if not isinstance(name, str):
            if "format" in given:
                self._fault((*path, "format"), "the name of a format", name)
        elif name in FORMATS:
            found += FORMATS[name]
        elif name in NOT_ENFORCED:
            self._fault((*path, "format"), f"one of {', '.join(FORMATS)}", name, is_annotation=True)
        has_length = "minLength" in given or "maxLength" in given
        self._is_risky |= len(found) > 1 or (bool(found) and has_length)
        return found

    def _pattern(self, pattern: Any, path: Path) -> str | None:
        """Return the translation of a regular expression to Rust's syntax.

        ``None`` if it has no translation, which is recorded as a fault.
        """
        self._is_risky = True
        if not isinstance(pattern, str):
            self._fault(path, "a regular expression", pattern)
            return None
        try:
            return to_rust(pattern)
        except ValueError as error:
            self._fault(path, str(error), pattern)
            return None

    def _array(self, schema: Given, given: Given, path: Path, base: str) -> dict[str, Any]:
        """Return the translated keywords that constrain arrays.

        ``given`` are the keywords of ``schema`` that are not left out.
        """
        found = self._counts(given, path, "minItems", "maxItems")
        # before draft 2020-12, ``items`` may be a list of schemas
        in_list = isinstance(schema.get("items"), list)
        first = "items" if in_list else "prefixItems"
        rest = "additionalItems" if in_list else "items"
        prefix = given.get(first, [])
        is_complete = isinstance(prefix, list) and (first in given or first not in schema)
        if isinstance(prefix, list):
            items = self._translate_all(prefix, (*path, first), base)
            if items:
                found["prefixItems"] = items
        else:
            self._fault((*path, first), "a list of schemas", prefix)
        if rest in given and is_complete:
            found["items"] = self._translate(given[rest], (*path, rest), base)
        elif rest in given and given[rest] is not True:
            self._fault((*path, rest), f"it together with {first!r}")
        return found

    def _object(self, schema: Given, given: Given, path: Path, base: str) -> dict[str, Any]:
        """Return the translated keywords that constrain objects.

        ``given`` are the keywords of ``schema`` that are not left out.
        """
        properties = self._schemas(given, "properties", path, base)
        by_pattern = self._schemas(given, "patternProperties", path, base)
        patterns = {
            name: self._pattern(name, (*path, "patternProperties", name))
            for name in by_pattern or {}
        }
        required = self._required(given, path)
        if properties is not None and len({*properties} - {*required}) > _MAX_OPTIONAL:
            self._fault(
                (*path, "properties"),
                f"at most {_MAX_OPTIONAL} that are not required",
                len(properties),
            )
            properties = None
        missing = properties is None or by_pattern is None or None in patterns.values()
        for key in ("properties", "patternProperties"):
            missing |= key in schema and key not in given
        others: Schema = True
        if "additionalProperties" in given and given["additionalProperties"] is not True:
            place = (*path, "additionalProperties")
            if missing:
                expected = "it together with 'properties' and 'patternProperties'"
                self._fault(place, expected)
            elif given["additionalProperties"] is False:
                others = False
            else:
                others = self._translate(given["additionalProperties"], place, base)
        named = {**(properties or {})}
        patterned = {
            pattern: by_pattern[name]
            for name, pattern in patterns.items()
            if pattern and by_pattern
        }
        if others is False and not patterned:
            unknown = [name for name in required if name not in named]
            if unknown:
                self._fault(
                    (*path, "required"), "names of properties, as there are no others", unknown[0]
                )
            required = [name for name in required if name in named]
        found = self._number_of_properties(given, path, len(required))
        found |= {"required": required} if required else {}
        return found | self._members(named, patterned, others, required)

    def _schemas(
        self, given: Given, keyword: str, path: Path, base: str
    ) -> dict[str, Schema] | None:
        """Return the translated value of a keyword that maps names to schemas: ``properties``, ….

        The result is ``None`` if the value is not a mapping.
        """
        value = given.get(keyword, {})
        if not isinstance(value, Mapping):
            self._fault((*path, keyword), "an object whose values are schemas", value)
            return None
        return {
            name: self._translate(inner, (*path, keyword, name), base)
            for name, inner in value.items()
        }

    def _required(self, given: Given, path: Path) -> list[str]:
        names = given.get("required", [])
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return [*dict.fromkeys(names)]
        self._fault((*path, "required"), "a list of names", names)
        return []

    def _number_of_properties(self, given: Given, path: Path, required: int) -> dict[str, Any]:
        """Return ``minProperties`` and ``maxProperties`` of an object.

        ``required`` is the number of required properties.
        """
        found = self._counts(given, path, "minProperties", "maxProperties")
        self._is_risky |= bool(found)
        if found.get("minProperties", 0) <= required:
            found.pop("minProperties", None)
        elif found["minProperties"] > 1:
            # A text may have a name twice, and the grammar would count it as two properties.
            self._fault(
                (*path, "minProperties"),
                "at most 1, or the number of required properties",
                given["minProperties"],
            )
            del found["minProperties"]
        return found

    def _members(
        self,
        named: dict[str, Schema],
        patterned: dict[str, Schema],
        others: Schema,
        required: Sequence[str],
    ) -> dict[str, Any]:
        """Return the keywords for the properties of an object.

        They are ``properties``, ``patternProperties`` and ``additionalProperties``.

        Args:
            named: schemas of properties by name.
            patterned: schemas of properties by a regular expression of their names.
            others: schema of all other properties.
            required: names of required properties.
        """
        self._is_risky |= bool(patterned)
        names = {*named, *required}
        if others is not False and (names or patterned):
            self._has_open_names = True
            is_long = any(len(name) > _MAX_NAME_IN_PATTERN for name in names)
            self._has_intersections |= bool(patterned) or is_long
            if self._names_by_pattern and not patterned and not is_long:
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

    def _in_place(
        self, given: Given, keyword: str, types: Collection[str], path: Path, base: str
    ) -> dict[str, Any]:
        """Return the translation of a keyword that constrains the value of the schema itself.

        These are ``allOf``, ``anyOf``, ``oneOf``, ``$ref``, ``const`` and ``enum``.
        """
        value = given[keyword]
        path = (*path, keyword)
        if keyword == "$ref":
            return self._reference(value, path, base)
        if keyword in ("enum", "const"):
            return self._values(value, keyword, types, path)
        if not isinstance(value, list) or not value:
            self._fault(path, "a list of schemas that is not empty", value)
            return {}
        options = self._translate_all(value, path, base)
        if keyword == "oneOf":
            self._alternatives.append((path, options))
        return {"allOf" if keyword == "allOf" else "anyOf": options}

    def _reference(self, reference: Any, path: Path, base: str) -> dict[str, Any]:
        """Return ``{"$ref": …}`` with the name of a definition.

        If the target of the reference has no definition yet, one is added.
        """
        target = self._references.resolve(reference, base) if isinstance(reference, str) else None
        if target is None or not isinstance(target.schema, (Mapping, bool)):
            self._fault(path, "a reference to a schema within the schema", reference)
            return {}
        if target.path in self._names:
            self._is_risky = True  # references may form a circle, which llguidance may refuse
        else:
            self._names[target.path] = f"d{len(self._names)}"
            self.targets.append(target)
            self._is_risky |= len(self.targets) > _MAX_SAFE_REFERENCES
        return {"$ref": f"#/$defs/{self._names[target.path]}"}

    def _values(
        self, value: Any, keyword: str, types: Collection[str], path: Path
    ) -> dict[str, Any]:
        """Return ``const`` or ``enum`` with only the values that have one of the allowed types."""
        values = [value] if keyword == "const" else value
        if not isinstance(values, list) or not values:
            self._fault(path, "a list of values that is not empty", value)
            return {}
        values = [plain_value(each) for each in values if has_type(each, types)]
        if not values:
            self._fault(path, f"a value of the type {' or '.join(types)}", value)
            return {}
        if not all(map(is_exact_value, values)):
            self._fault(path, "numbers with at most 15 digits", value)
            return {}
        if not self._names_by_pattern and any(map(has_controls, values)):
            self._fault(
                path, "strings without control characters beside intersected objects", value
            )
            return {}
        return {"const": values[0]} if keyword == "const" else {"enum": values}

    def _leave_out_not_checkable(self, given: Given, types: Collection[str], path: Path) -> None:
        """Record a fault for each keyword that llguidance cannot follow and that has an effect."""
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
                self._fault((*path, keyword), LEFT_TO_RIGHT)


def _allows_names(schema: Any) -> bool:
    """Return whether a schema of ``propertyNames`` allows every name."""
    if not isinstance(schema, Mapping):
        return schema is True
    types = schema.get("type", "string")
    has_strings = types == "string" or (isinstance(types, list) and "string" in types)
    return has_strings and _CONSTRAIN_STRINGS.isdisjoint(schema)
