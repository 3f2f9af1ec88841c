"""Random JSON schemas, and a check of texts against a schema."""

import json
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jsonschema

_WORDS = "name age kind tags place size 'quoted' id_1 größe items note".split()


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a random schema of an object, whose parts have a limited length, so that texts end."""
    return _object(dice, depth)


def fits(text: str, schema: dict[str, Any]) -> bool:
    """Return whether a text is JSON that fits a schema, by the ``jsonschema`` package."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    exact = jsonschema.validators.extend(kind, {"multipleOf": _multiple})
    return bool(exact(schema).is_valid(json.loads(text)))


def is_checkable(schema: dict[str, Any]) -> bool:
    """Return whether Python compiles all patterns of a schema, which may be JavaScript's."""
    for pattern in _patterns(schema):
        try:
            re.compile(pattern)
        except re.error:
            return False
    return True


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "patternProperties" and isinstance(inner, dict):
                yield from inner
            if key == "pattern" and isinstance(inner, str):
                yield inner
            yield from _patterns(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _patterns(inner)


def _multiple(_: Any, of: float, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Check ``multipleOf`` as the package does, but exactly and for numbers of any size."""
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and Fraction(str(value)) % Fraction(str(of))
    ):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {of}")


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    names = dice.sample(_WORDS, dice.randint(1, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(dice, depth - 1) for name in names},
        "required": names if dice.random() < 0.7 else names[:1],
    }
    if dice.random() < 0.8:
        made["additionalProperties"] = False
    return made


def _any(dice: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _number, _enum, _string, _number, _enum, _pattern]
    return dice.choice(kinds if depth <= 0 else [*kinds, _object, _array, _either])(dice, depth)


def _string(dice: random.Random, _: int) -> dict[str, Any]:
    low = dice.choice([0, 0, 2])
    return {"type": "string", "minLength": low, "maxLength": low + dice.choice([1, 8, 20])}


def _number(dice: random.Random, _: int) -> dict[str, Any]:
    low = dice.randint(-100, 100)
    return dice.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 300)},
            {
                "type": "integer",
                "exclusiveMinimum": low,
                "exclusiveMaximum": low + dice.randint(2, 10),
            },
            {"type": "number", "minimum": low, "maximum": low + 1.5},
            {"type": "integer", "multipleOf": dice.choice([2, 5, 7]), "minimum": 0, "maximum": 50},
            {"type": "boolean"},
            {"type": "null"},
        ]
    )


def _enum(dice: random.Random, _: int) -> dict[str, Any]:
    values = ["red", "green", 'with "quotes"', "zwölf", 3, 2.5, None, True, "", "red wine"]
    return (
        {"enum": dice.sample(values, dice.randint(1, 4))}
        if dice.random() < 0.7
        else {"const": dice.choice(values)}
    )


def _pattern(dice: random.Random, _: int) -> dict[str, Any]:
    pattern = dice.choice([r"^[A-Z]{2}-[0-9]{1,4}$", r"^(ab|cd)+e?$", r"^\d{4}-\d{2}$", "^x"])
    return {"type": "string", "pattern": pattern, "maxLength": 24}


def _array(dice: random.Random, depth: int) -> dict[str, Any]:
    low = dice.randint(0, 2)
    return {
        "type": "array",
        "items": _any(dice, depth - 1),
        "minItems": low,
        "maxItems": low + dice.randint(0, 2),
    }


def _either(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(dice, depth - 1) for _ in range(2)]}
