"""Translation of a JSON schema of any draft to the keywords that llguidance follows exactly.

The result has no annotations and no ``$id``; its references are ``#/$defs/d0``, ``#/$defs/d1``, ….
A keyword without an exact counterpart becomes a :class:`Fault` and is left out. Leaving a keyword
out never forbids a value: keywords that depend on it, as ``additionalProperties`` depends on
``properties``, are left out, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pronk.text.json_schema.disjoint import are_disjoint
from pronk.text.json_schema.findings import Fault, Findings, Keywords
from pronk.text.json_schema.members import (
    Schema,
    translate_array,
    translate_list,
    translate_object,
)
from pronk.text.json_schema.references import (
    MAPS_OF_SCHEMAS,
    Path,
    References,
    SchemaPart,
    base_within,
)
from pronk.text.json_schema.scalars import string_patterns, translate_counts, translate_numbers
from pronk.text.json_schema.uncheckable import leave_out_uncheckable
from pronk.text.json_schema.values import has_controls, has_type, is_exact_value, plain_value

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

_MAX_DEPTH = 64  # maximum number of keys and indices between the root and a schema
_MAX_SAFE_REFERENCES = 64  # number of definitions up to which no chain of references is too long

_SMALLER = "a schema that is simpler, and that some value matches"
_LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
# Keywords that constrain the value of the schema itself, not its elements or properties.
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "const", "enum")
# Keywords whose values contain schemas, except those for definitions.
_PARTS = (
    "properties", "patternProperties", "additionalProperties", "prefixItems", "items",
    "additionalItems", "allOf", "anyOf", "oneOf",
)  # fmt: skip


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
    # The two remedies for the names of additional properties are described in ``members``.
    by_pattern = _Translator(references, left_out, multiple, names_by_pattern=True)
    translated = by_pattern.run(root)
    if not by_pattern.intersects_open_names:
        return translated
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


class _Translator:
    r"""Translator of one schema with its definitions.

    If ``names_by_pattern``, expressions exclude names from those of additional properties.
    Otherwise the grammar must exclude escapes such as ``\u0061`` from all strings.

    Attributes:
        targets: targets of references so far, in the order in which they were found.
    """

    def __init__(
        self,
        references: References,
        left_out: Collection[Path],
        multiple: int,
        *,
        names_by_pattern: bool,
    ) -> None:
        self.targets = list[SchemaPart]()
        self._references = references
        self._left_out = left_out
        self._names_by_pattern = names_by_pattern
        self._findings = Findings(multiple)
        # name of the definition of each target, by the target's path
        self._names = dict[Path, str]()
        # path of each oneOf, and its translated schemas
        self._alternatives = list[tuple[Path, list[Schema]]]()

    @property
    def intersects_open_names(self) -> bool:
        """Whether llguidance cannot exclude names from additional properties by an expression."""
        return self._findings.has_open_names and self._findings.has_intersections

    def run(self, root: SchemaPart) -> TranslatedSchema:
        """Return the translation of a schema, with the definitions to which it refers."""
        schema = self._translate(root)
        definitions = dict[str, Schema]()
        # translating a definition may append further targets to this list
        for target in self.targets:
            name = self._names[target.path]
            definitions[name] = self._translate(target)
        for path, options in self._alternatives:
            if not are_disjoint(options, definitions):
                expected = "alternatives of which no value matches two, or 'anyOf'"
                self._findings.add_fault(path, expected)
        if definitions and not isinstance(schema, bool):
            schema["$defs"] = definitions
        return TranslatedSchema(
            schema,
            tuple(self._findings.faults),
            self._findings.is_risky,
            has_control_escapes=self._names_by_pattern,
            multiple=self._findings.multiple,
        )

    def _translate(self, part: SchemaPart) -> Schema:
        """Return the translation of a schema.

        A schema that is left out is recorded as a fault and becomes True, which allows any value.
        """
        schema = part.schema
        findings = self._findings
        if part.path in self._left_out:
            findings.add_fault(part.path, _SMALLER, schema)
            return True
        if len(part.path) > _MAX_DEPTH:
            expected = f"a schema of at most {_MAX_DEPTH} levels"
            findings.add_fault(part.path, expected, schema)
            return True
        if isinstance(schema, bool):
            findings.is_risky |= not schema
            return schema
        if not isinstance(schema, Mapping):
            findings.add_fault(part.path, "a schema, an object or true", schema)
            return True
        base = base_within(schema, part.base)
        return self._translate_keywords(self._keywords(SchemaPart(schema, part.path, base)))

    def _keywords(self, part: SchemaPart) -> Keywords:
        """Return the keywords of a schema; record those to leave out."""
        given = dict[str, Any]()
        for key, value in part.schema.items():
            path = (*part.path, key)
            if path in self._left_out:
                self._findings.add_fault(path, _SMALLER)
            else:
                given[key] = value
        return Keywords(part.schema, given, part.path, part.base, self._findings)

    def _translate_keywords(self, keywords: Keywords) -> Schema:
        types = _types(keywords)
        leave_out_uncheckable(keywords, types)
        plain, patterns = self._plain(keywords, types)
        # Further schemas that a value must match as well: a schema can have each keyword only once.
        further: list[Schema] = [{"pattern": pattern} for pattern in patterns[1:]]
        # In llguidance's grammar, the properties of an object have the order of the keywords that
        # name them: ``properties``, ``allOf``, ``$ref``. Therefore the keywords keep their order.
        result = {} if "properties" in keywords.given else plain.copy()
        in_place = dict[str, Any]()
        for key in keywords.given:
            if key == "properties":
                result |= plain
            elif key in _IN_PLACE:
                for keyword, value in self._in_place(keywords, key, types).items():
                    if keyword in in_place:
                        further.append({keyword: value})
                    else:
                        in_place[keyword] = value
                        result[keyword] = value
        if further:
            result["allOf"] = [*result.get("allOf", []), *further]
        findings = self._findings
        findings.is_risky |= "allOf" in result
        findings.is_risky |= bool(in_place) and len(in_place) + len(plain) > 1
        num_constraints = len(in_place) + len(result.get("allOf", [])[1:])
        num_constraints += bool({*plain} - {"type"})
        has_schemas = not {"allOf", "anyOf", "$ref"}.isdisjoint(in_place)
        findings.has_intersections |= num_constraints > 1 and has_schemas
        return result or True

    def _plain(self, keywords: Keywords, types: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the translated keywords that constrain values of one type, such as ``maxLength``.

        The second result is the list of regular expressions that a string must match, of which the
        keywords have the first one.
        """
        plain = dict[str, Any]()
        patterns = list[str]()
        if types != TYPES:
            plain["type"] = types[0] if len(types) == 1 else [*types]
        if "number" in types or "integer" in types:
            plain |= translate_numbers(keywords, integers_only="number" not in types)
        if "string" in types:
            patterns = string_patterns(keywords)
            plain |= translate_counts(keywords, "minLength", "maxLength")
        if patterns:
            plain["pattern"] = patterns[0]
        if "array" in types:
            plain |= translate_array(keywords, self._translate)
        if "object" in types:
            plain |= translate_object(
                keywords, self._translate, names_by_pattern=self._names_by_pattern
            )
        return plain, patterns

    def _in_place(self, keywords: Keywords, keyword: str, types: Collection[str]) -> dict[str, Any]:
        """Return the translation of a keyword that constrains the value of the schema itself.

        These are ``allOf``, ``anyOf``, ``oneOf``, ``$ref``, ``const`` and ``enum``.
        """
        if keyword == "$ref":
            return self._reference(keywords)
        if keyword in ("enum", "const"):
            return self._values(keywords, keyword, types)
        part = keywords.part(keyword)
        if not isinstance(part.schema, list) or not part.schema:
            keywords.add_fault(keyword, "a list of schemas that is not empty", part.schema)
            return {}
        options = translate_list(part, self._translate)
        if keyword == "oneOf":
            self._alternatives.append((part.path, options))
        return {"allOf" if keyword == "allOf" else "anyOf": options}

    def _reference(self, keywords: Keywords) -> dict[str, Any]:
        """Return ``{"$ref": …}`` with the name of a definition.

        If the target of the reference has no definition yet, one is added.
        """
        reference = keywords.given["$ref"]
        target = None
        if isinstance(reference, str):
            target = self._references.resolve(reference, keywords.base)
        if target is None or not isinstance(target.schema, (Mapping, bool)):
            keywords.add_fault("$ref", "a reference to a schema within the schema", reference)
            return {}
        if target.path in self._names:
            # references may form a circle, which llguidance may refuse
            self._findings.is_risky = True
        else:
            self._names[target.path] = f"d{len(self._names)}"
            self.targets.append(target)
            self._findings.is_risky |= len(self.targets) > _MAX_SAFE_REFERENCES
        return {"$ref": f"#/$defs/{self._names[target.path]}"}

    def _values(self, keywords: Keywords, keyword: str, types: Collection[str]) -> dict[str, Any]:
        """Return ``const`` or ``enum`` with only the values that have one of the allowed types."""
        value = keywords.given[keyword]
        values = [value] if keyword == "const" else value
        if not isinstance(values, list) or not values:
            keywords.add_fault(keyword, "a list of values that is not empty", value)
            return {}
        values = [plain_value(each) for each in values if has_type(each, types)]
        if not values:
            keywords.add_fault(keyword, f"a value of the type {' or '.join(types)}", value)
            return {}
        if not all(map(is_exact_value, values)):
            keywords.add_fault(keyword, "numbers with at most 15 digits", value)
            return {}
        if not self._names_by_pattern and any(map(has_controls, values)):
            expected = "strings without control characters beside intersected objects"
            keywords.add_fault(keyword, expected, value)
            return {}
        return {"const": values[0]} if keyword == "const" else {"enum": values}


def _types(keywords: Keywords) -> tuple[str, ...]:
    """Return the types of values that ``type`` allows; all types without that keyword."""
    value = keywords.given.get("type", [*TYPES])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or any(name not in TYPES for name in names):
        keywords.add_fault("type", f"one or several of {', '.join(TYPES)}", value)
        return TYPES
    return tuple(dict.fromkeys(names)) if "type" in keywords.given else TYPES
