"""Schemas of any draft as grammars: what is enforced, what is left out, and what is refused.

Soundness: a text of the grammar fits the schema without the keywords that were left out.
Completeness: a value that fits the schema has a text in the grammar. Both are checked with random
schemas, by an independent validator.
"""

import json
import random
import re
from collections import Counter
from itertools import islice
from typing import Any

import pytest

from pronk.base.errors import GuideError
from pronk.text.json_schema import relax as module
from pronk.text.json_schema.relax import check, relax
from schema_corpus import (
    Corpus,
    accepts,
    accepts_in_some_order,
    instance,
    is_valid,
    parse,
    texts,
    without,
)


def check_soundness(seeds: range, each: int) -> Counter[str]:
    counts = Counter[str]()
    for seed in seeds:
        schema = Corpus(seed).schema()
        relaxed = relax(schema)
        rest = without(schema, relaxed.dropped)
        counts["left out"] += bool(relaxed.dropped)
        counts["all left out"] += "" in relaxed.dropped
        for text in islice(texts(relaxed.schema, random.Random(seed)), each):
            if text:
                counts["texts"] += 1
                assert is_valid(parse(text), rest), (seed, text, schema, relaxed)
    return counts


def check_completeness(seeds: range, each: int) -> Counter[str]:
    counts = Counter[str]()
    for seed in seeds:
        schema = Corpus(seed, faulty=0).schema()
        if any(
            f'"{reference}"' in json.dumps(schema)
            for reference in ("#/$defs/nowhere", "http://x/y", "#")
        ):
            continue
        relaxed = relax(schema)
        dice = random.Random(seed)
        for _ in range(each):
            value = instance(schema, schema, dice)
            if is_valid(value, schema):
                counts["values"] += 1
                assert accepts_in_some_order(relaxed.schema, value), (seed, value, schema, relaxed)
    return counts


def test_texts_fit_the_schema_without_what_was_left_out() -> None:
    counts = check_soundness(range(300), 5)
    assert counts["texts"] > 1000
    assert counts["left out"] > 30
    assert counts["all left out"] < 15


@pytest.mark.slow
def test_texts_of_many_schemas_fit() -> None:
    assert check_soundness(range(300, 20_000), 6)["texts"] > 50_000


def test_values_of_the_schema_have_a_text() -> None:
    assert check_completeness(range(150), 8)["values"] > 300


@pytest.mark.slow
def test_values_of_many_schemas_have_a_text() -> None:
    assert check_completeness(range(150, 10_000), 10)["values"] > 20_000


def test_schemas_of_a_file(schemas: list[dict[str, Any]]) -> None:
    """Texts fit the schemas of the option ``--schemas``, for example those of the JSON Schema Test
    Suite.
    """
    for number, schema in enumerate(schemas):
        relaxed = relax(schema)
        rest = without(schema, relaxed.dropped)
        for text in islice(texts(relaxed.schema, random.Random(number)), 20):
            assert not text or is_valid(json.loads(text), rest), (text, schema, relaxed)


# A schema, what is left out of it, and the path and the words of the error for a schema that must
# not be relaxed.
LEFT_OUT: list[tuple[dict[str, Any], list[str], str]] = [
    ({"not": {"type": "null"}}, ["not"], ("expected keywords that can be checked from left to right, "
        "found 'not'")),
    ({"uniqueItems": True}, ["uniqueItems"], "found 'uniqueItems'; remove it"),
    ({"if": {}, "then": {"minimum": 1}}, ["if", "then"], "found 'if'; remove it"),
    ({"if": {}, "else": False}, ["if", "else"], "found 'if'"),
    ({"contains": {"type": "null"}, "maxContains": 2}, ["contains", "maxContains"], "found 'contains'"),
    ({"propertyNames": {"minLength": 2}}, ["propertyNames"], "found 'propertyNames'"),
    ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired"], "found 'dependentRequired'"),
    ({"dependentSchemas": {"a": False}}, ["dependentSchemas"], "found 'dependentSchemas'"),
    ({"dependencies": {"a": ["b"]}}, ["dependencies"], "found 'dependencies'"),
    ({"unevaluatedProperties": False}, ["unevaluatedProperties"], "found 'unevaluatedProperties'"),
    ({"unevaluatedItems": False}, ["unevaluatedItems"], "found 'unevaluatedItems'"),
    ({"$dynamicRef": "#a"}, ["$dynamicRef"], "found '$dynamicRef'"),
    ({"$recursiveRef": "#"}, ["$recursiveRef"], "found '$recursiveRef'"),
    ({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, ["oneOf"], "or 'anyOf', found 'oneOf'"),
    ({"required": ["a", "b"], "properties": {"a": {}}, "additionalProperties": False}, ["required"],
     "required: expected names of properties, as there are no others, found 'b'"),
    ({"pattern": "(?=a)b"}, ["pattern"], "pattern: expected no look-around"),
    ({"pattern": r"(a)\1"}, ["pattern"], "pattern: expected known escapes and no back-references"),
    ({"pattern": r"\bword\b"}, ["pattern"], "pattern: expected no word boundaries"),
    ({"pattern": "(a"}, ["pattern"], "pattern: expected a parenthesis"),
    ({"pattern": 3}, ["pattern"], "pattern: expected a regular expression, found 3"),
    ({"patternProperties": {"(?=a)": {}}, "additionalProperties": False},
     ["patternProperties.(?=a)", "additionalProperties"], ("patternProperties.(?=a): expected no "
         "look-around")),
    ({"patternProperties": {"^a": {}, "b$": {}}, "additionalProperties": False},
     ["patternProperties", "additionalProperties"], "found 'patternProperties'"),
    ({"properties": 3, "additionalProperties": False}, ["properties", "additionalProperties"], "properties: expected"),
    ({"prefixItems": {}, "items": False}, ["prefixItems", "items"], ("prefixItems: expected a list of "
        "schemas")),
    ({"properties": {"a": None}}, ["properties.a"], ("properties.a: expected a schema, an object or true, "
        "found None")),
    ({"type": "strng"}, ["type"], "type: expected one or several of null, boolean,"),
    ({"type": ["string", 3]}, ["type"], "type: expected one or several of"),
    ({"type": []}, ["type"], "type: expected one or several of"),
    ({"required": "a"}, ["required"], "required: expected a list of names, found 'a'"),
    ({"required": True}, ["required"], "required: expected a list of names"),
    ({"minimum": "3"}, ["minimum"], "minimum: expected a number, found '3'"),
    ({"maximum": 2**60 + 1}, ["maximum"], "maximum: expected a number with at most 15 digits"),
    ({"minLength": -1}, ["minLength"], "minLength: expected an integer of at least 0"),
    ({"maxItems": 1.5}, ["maxItems"], "maxItems: expected an integer of at least 0"),
    ({"multipleOf": 0}, ["multipleOf"], "multipleOf: expected a number above 0"),
    ({"multipleOf": 1000003}, ["multipleOf"], "multipleOf: expected digits whose common multiple"),
    ({"enum": []}, ["enum"], "enum: expected a list of values that is not empty"),
    ({"enum": "a"}, ["enum"], "enum: expected a list of values"),
    ({"const": 2**70}, ["const"], "const: expected numbers with at most 15 digits"),
    ({"type": "string", "const": 3}, ["const"], ("const: expected a value of the type string, found "
        "3")),
    ({"format": 3}, ["format"], "format: expected the name of a format"),
    ({"anyOf": []}, ["anyOf"], "anyOf: expected a list of schemas that is not empty"),
    ({"allOf": {}}, ["allOf"], "allOf: expected a list of schemas that is not empty"),
    ({"$ref": "#/$defs/none"}, ["$ref"], ("$ref: expected a reference to a schema within the "
        "schema")),
    ({"$ref": "http://example.com/schema"}, ["$ref"], ("$ref: expected a reference to a schema within the "
        "schema")),
    ({"$ref": 3}, ["$ref"], "$ref: expected a reference"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, ["minimum"], "found 'minimum'; remove it"),
    ({"type": "object", "minProperties": 1, "properties": {"a": {}}, "required": ["b"], "allOf": [{"type": "null"}]},
     ["allOf"], "found 'allOf'"),
    ({"type": "object", "minProperties": 1, "properties": {"a": {}}, "allOf": [{"type": "null"}]},
     ["minProperties", "allOf"], "found 'minProperties'"),
    ({"type": "string", "minLength": 5, "pattern": "^a$"}, ["pattern"], "found 'pattern'"),
    ({"minProperties": 2}, ["minProperties"], "minProperties: expected at most 1"),
    ({"type": "object", "required": ["a"], "properties": {"a": False}}, ["properties.a"], "properties.a: expected"),
]  # fmt: skip


def at(place: str, schema: Any) -> tuple[dict[str, Any], str]:
    """Return a schema that has another one at some place, and its path."""
    holders: dict[str, tuple[dict[str, Any], str]] = {
        "root": (schema, ""),
        "property": ({"type": "object", "properties": {"m": schema}, "required": ["m"]}, "properties.m."),
        "nested": ({"items": {"additionalProperties": schema, "minProperties": 1, "type": "object"}, "minItems": 1,
                    "type": "array"}, "items.additionalProperties."),
        "definition": ({"$ref": "#/$defs/x", "$defs": {"x": schema}}, "$defs.x."),
        "alternative": ({"anyOf": [schema]}, "anyOf.0."),
        "conjunct": ({"allOf": [schema]}, "allOf.0."),
        "tuple": ({"prefixItems": [schema], "minItems": 1, "type": "array"}, "prefixItems.0."),
        "pattern": ({"patternProperties": {"^x": schema}}, "patternProperties.^x."),
    }  # fmt: skip
    return holders[place]


@pytest.mark.parametrize(
    "place", ["root", "property", "nested", "definition", "alternative", "conjunct", "tuple"]
)
@pytest.mark.parametrize(("schema", "dropped", "message"), LEFT_OUT, ids=range(len(LEFT_OUT)))
def test_keywords_that_no_grammar_enforces(
    schema: dict[str, Any], dropped: list[str], message: str, place: str
) -> None:
    """They are left out and reported, or else refused with their path; a text always remains."""
    whole, prefix = at(place, schema)
    relaxed = relax(whole)
    assert [*relaxed.dropped] == [f"{prefix}{path}" for path in dropped]
    assert any(islice(texts(relaxed.schema, random.Random(1), longest=400), 20))
    with pytest.raises(GuideError) as caught:
        check(whole)
    error = str(caught.value)
    assert error.startswith(f"guide: json: {prefix[:-1]}")
    assert message in error
    assert "\n" not in error
    assert len(error) < 500


NOTHING: list[dict[str, Any]] = [
    {"uniqueItems": False},
    {"not": False},
    {"propertyNames": True},
    {"propertyNames": {"type": "string", "title": "name"}},
    {"propertyNames": {}},
    {"additionalProperties": True},
    {"additionalProperties": {}},
    {"minItems": 0, "minLength": 0, "minProperties": 0, "minContains": 2},
    {"contains": {"type": "null"}, "minContains": 0},
    {"if": {"type": "null"}},
    {"then": False, "else": False},
    {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    {"unevaluatedItems": True, "unevaluatedProperties": {}},
    {"format": "no-such-format"},
    {"format": "int64"},
    {"additionalItems": False},
    {"exclusiveMinimum": False},
    {
        "$schema": "http://unknown/schema",
        "$id": "http://x/y",
        "$anchor": "a",
        "$vocabulary": {},
        "$comment": "c",
    },
    {
        "title": 1,
        "description": None,
        "default": [],
        "examples": 3,
        "deprecated": True,
        "readOnly": True,
    },
    {
        "nullable": True,
        "discriminator": {"propertyName": "a"},
        "x-order": 1,
        "unknown": {"not": {}},
    },
    {"contentEncoding": "base64", "contentMediaType": "a/b", "contentSchema": False},
    {"required": []},
    {"x-guidance": {"lenient": True, "item_separator": ";"}},
]


@pytest.mark.parametrize("schema", NOTHING, ids=range(len(NOTHING)))
def test_keywords_that_ask_for_nothing(schema: dict[str, Any]) -> None:
    assert relax(schema) == relax({})
    assert check(schema) == relax({}).schema


@pytest.mark.parametrize("kind", ["string", "array"])
def test_keywords_of_other_types_ask_for_nothing(kind: str) -> None:
    other = {"string": "array", "array": "string"}[kind]
    keywords: dict[str, dict[str, Any]] = {
        "array": {"uniqueItems": True, "contains": {}},
        "string": {"pattern": "(?=a)", "maxLength": "x"},
    }
    assert relax({"type": kind, "dependentRequired": {"a": ["b"]}, **keywords[other]}) == relax(
        {"type": kind}
    )


# Schemas that are followed exactly, texts that fit, and texts that do not.
EXACT: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "object", "properties": {"a": {"type": "integer"}}},
     ['{"a": 1}', '{"b": "x"}', '{"a": 1, "b": {}}'], ['{"a": "x"}', r'{"\u0061": "x"}', r'{"a": 1, "\u0061": "x"}']),
    ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "null"}}}]},
     ['{"a": 1, "b": null, "c": 2}'], [r'{"\u0061": "x"}', '{"b": 1}']),
    ({"patternProperties": {"^x": {"type": "null"}}, "type": "object"},
     ['{"x1": null, "y": 3}'], ['{"x1": 3}', r'{"\u00781": 3}']),
    ({"patternProperties": {"": {"type": "null"}}, "type": "object"}, ["{}", '{"x": null}'], ['{"x": 3}']),
    ({"type": "string"}, [r'"\u0003"', '"é"'], ["1"]),
    ({"type": "string", "pattern": '^[^"]*$'}, ['"a b"', r'"\\"'], [r'"\""']),
    ({"type": "string", "pattern": "^[a&&b]$"}, ['"&"', '"a"'], ['"c"']),
    ({"type": "string", "pattern": "^.$"}, ['"a"', '"é"'], [r'"\r"', '"\u2028"']),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "-0", "0.6"]),
    ({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, ["-1.5", "-1.2"], ["-1", "-2"]),
    ({"type": "integer", "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63)]),
    ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, ["4"], ["3"]),  # draft 4
    ({"items": [{"type": "null"}], "additionalItems": {"type": "boolean"}}, ["[null, true]"], ["[true]", "[null, 1]"]),
    ({"$ref": "#/definitions/a", "definitions": {"a": {"const": 1}}}, ["1"], ["2"]),
    ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor", "const": 1}}}, ["1"], ["2"]),
    ({"$ref": "b", "$id": "http://x/a",
      "$defs": {"b": {"$id": "b", "$ref": "#/$defs/c", "$defs": {"c": {"const": 1}}}}}, ["1"], ["2"]),
    ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 1}}}, ["1"], ["2"]),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, ["3"], ["2"]),
    ({"type": "array", "items": {"$ref": "#"}}, ["[[], [[]]]"], ["[1]"]),
    ({"type": ["string", "null"]}, ["null", '"a"'], ["1"]),
    ({"enum": [1.0, "é", None, {"a": [1]}]}, ["1", '"é"', "null", '{"a": [1]}'], ["2", '{"a": []}']),
    ({"type": "integer", "enum": ["a", 1, 1.5]}, ["1"], ['"a"', "1.5"]),
    ({"required": ["a"], "additionalProperties": {"type": "null"}, "type": "object"},
     ['{"a": null}'], ["{}", '{"a": 1}']),
    ({"properties": {"a": False}}, ['{"b": 1}'], ['{"a": 1}']),
    ({"minLength": 2.0, "type": "string"}, ['"ab"'], ['"a"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), EXACT, ids=range(len(EXACT)))
def test_schemas_that_are_followed_exactly(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    relaxed = relax(schema)
    assert not relaxed.dropped
    assert check(schema) == relaxed.schema
    assert [text for text in good if not accepts(relaxed.schema, text)] == []
    assert [text for text in bad if accepts(relaxed.schema, text)] == []


TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind}, "x": {}}, "required": ["kind"]}
    for kind in "ab"
]
ONE_OF: list[tuple[dict[str, Any], bool]] = [
    ({"oneOf": TAGGED}, True),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": dict(zip("ab", TAGGED, strict=True))}, True),
    ({"oneOf": [{"allOf": [TAGGED[0], {"required": ["x"]}]}, TAGGED[1]]}, True),
    ({"oneOf": [{"type": "string"}, {"type": "null"}, {"type": "array"}]}, True),
    ({"oneOf": [{"enum": ["a", "b"]}, {"const": "c"}, {"const": 1}]}, True),
    ({"oneOf": [{"const": 1}, {"const": True}]}, True),
    ({"oneOf": [{"properties": {"a": {}}, "required": ["a"], "type": "object"},
                {"properties": {"b": {}}, "additionalProperties": False, "type": "object"}]}, True),
    ({"oneOf": [{"type": "string"}]}, True),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, False),
    ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b"]}]}, False),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, False),
    # not required
    ({"oneOf": [{"properties": {"kind": {"const": kind}}, "type": "object"} for kind in "ab"]}, False),
    ({"oneOf": [{"const": 1, "not": {}}, {"const": 1}]}, False),
    ({"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}, False),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "is_exact"), ONE_OF, ids=range(len(ONE_OF)))
def test_alternatives_of_which_no_value_matches_two(schema: dict[str, Any], is_exact: bool) -> None:
    assert ("oneOf" in relax(schema).dropped) != is_exact


def test_control_characters_beside_intersected_objects() -> None:
    """Such a grammar has no escapes of control characters, so that a value with one could not be
    written.
    """
    objects = [{"properties": {"a": {}}}, {"properties": {"b": {}}}]
    schema = {"properties": {"c": {"const": "\u0003"}}, "required": ["c"], "type": "object"}
    assert relax(schema).dropped == ()
    assert relax({**schema, "allOf": objects}).dropped == ("properties.c.const",)


def test_names_stay_exact_without_a_control_character() -> None:
    """Left out, the constant intersects no objects, but names are not excluded by expressions."""
    objects = [{"properties": {"a": {"type": "null"}}, "type": "object"}, {"type": "string"}]
    relaxed = relax({"enum": ["\u0003"], "anyOf": objects})
    assert relaxed.dropped == ("enum",)
    assert accepts(relaxed.schema, '{"a": null, "b": 3}')
    assert not accepts(relaxed.schema, r'{"\u0061": 3}')


def test_circles_that_no_text_ends_are_left_out() -> None:
    for schema in (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#"}]},
    ):
        relaxed = relax(schema)
        assert relaxed.dropped
        assert any(islice(texts(relaxed.schema, random.Random(0)), 20))
        with pytest.raises(GuideError, match=r"found '\$ref'|found 'minItems'"):
            check(schema)


def test_long_schemas_lose_a_property_or_everything() -> None:
    names = {
        f"property_{number}": {"type": "integer", "enum": [*range(30)]} for number in range(60)
    }
    bad = {"type": "string", "pattern": "^a$", "minLength": 2}
    required = {"type": "object", "properties": {**names, "bad": bad}, "required": ["bad"]}
    assert relax(required).dropped == ("properties.bad",)
    chain = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(1000)
    }
    assert relax({"$ref": "#/$defs/d0", "$defs": {**chain, "d1000": {}}}).dropped == ("",)


def test_each_schema_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same schema is translated once; one without risky keywords is not compiled at all."""
    calls = list[object]()

    def accepts_any(schema: object) -> bool:
        calls.append(schema)
        return True

    monkeypatch.setattr(module, "accepts", accepts_any)
    module._cached.cache_clear()
    ordinary = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "a file"},
            "lines": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 20},
            "mode": {"enum": ["r", "w"], "default": "r"},
            "when": {"type": "string", "format": "date-time"},
        },
        "required": ["path"],
        "additionalProperties": False,
    }
    assert relax(ordinary) == relax(ordinary)
    assert calls == []
    module._cached.cache_clear()


def test_deep_schemas_are_cut() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    assert relax(schema).dropped == (".".join(["properties.a"] * 33),)


KEYWORDS = [
    "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "properties", "patternProperties",
    "additionalProperties", "required", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependencies", "items", "prefixItems", "additionalItems", "contains", "minContains", "maxItems", "uniqueItems",
    "maxLength", "pattern", "format", "minimum", "exclusiveMaximum", "multipleOf", "$ref", "$id", "$anchor", "$defs",
    "$dynamicRef", "$schema", "default", "unevaluatedItems", "title", "x-guidance",
]  # fmt: skip
SCRAPS = [
    None, True, False, 0, 1, -1, 2.5, float("inf"), 10**400, "", "string", "(?=a)", "#", "#/$defs/a", "a", "^a", [], {},
    "http://x", "//[", "http://[", "#/%zz", "\0",
]  # fmt: skip


def scraps(dice: random.Random, depth: int) -> Any:
    """Return a random JSON value whose keys are mostly keywords."""
    kind = dice.random()
    if depth <= 0 or kind < 0.35:
        return dice.choice(SCRAPS)
    if kind < 0.5:
        return [scraps(dice, depth - 1) for _ in range(dice.randint(0, 3))]
    return {
        dice.choice([*KEYWORDS, "a"]): scraps(dice, depth - 1) for _ in range(dice.randint(1, 4))
    }


def test_every_json_value_can_be_relaxed() -> None:
    for seed in range(400):
        dice = random.Random(seed)
        schema = {
            "properties": {"a": scraps(dice, 3)},
            "allOf": [scraps(dice, 3)],
            "$defs": {"a": scraps(dice, 2)},
        }
        relaxed = relax(schema)
        assert next(texts(relaxed.schema, dice, longest=60)) is not None
        error = _error(schema)
        assert error is None or re.fullmatch(
            r"guide: json: .*expected .*, found .*; (change|remove) it", error
        )
        assert error is None or relaxed.dropped


def _error(schema: dict[str, Any]) -> str | None:
    try:
        check(schema)
    except GuideError as error:
        return str(error)
    return None


@pytest.mark.parametrize("length", [10, 40, 41, 62, 63, 600, 5000])
def test_long_names_of_properties_beside_open_ones(length: int) -> None:
    name = "n" * length
    schema = {"type": "object", "properties": {name: {"type": "integer"}}}
    relaxed = relax(schema)
    assert relaxed.dropped == ()
    assert accepts(relaxed.schema, json.dumps({name: 1, "other": "x"}))
    assert not accepts(relaxed.schema, json.dumps({name: "x"}))
