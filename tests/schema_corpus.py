"""Random schemas with all keywords, random texts of their grammars, and a validator.

The validator is independent of pronk's code.
"""

import copy
import datetime as dt
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import islice, permutations, product
from math import inf, isfinite
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pronk.text.json_schema.trial import BYTES, LIMITS

NAMES = ["a", "b", "ab", "größe", "x/y", 'q"t', "__proto__", "m~n", "\\"]
STRINGS = [
    "",
    "a",
    "ab",
    "\\",
    "b\\n",
    "abc",
    "zwölf",
    'say "hi"',
    "a\nb",
    "\u0003",
    "aaaa",
    "😀",
    "red",
    "2024-02-29",
    "x" * 12,
]
NUMBERS = [0, 1, -1, 2, 3, 7, 10, 2.5, -0.5, 0.1, 100, 1.0, 1e3, -12, 0.25, 2**53 + 1, 2**63]
PATTERNS = [
    "^a",
    "b$",
    "^[a-c]+$",
    "a",
    "^$",
    "^(ab|c)*$",
    "^.{2,3}$",
    "^a$|^b$",
    "[^a]",
    "^x-",
    "^\\w+$",
    '^[^"]*$',
    "^[^a\\\\]+$",
]
BAD_PATTERNS = ["(?=a)b", "(a)\\1", "\\bx", "(", "[", "a**", "(?!x)", "(?<=a)b", "\\p{Nonsense}"]
FORMATS = [
    "date",
    "time",
    "date-time",
    "ipv4",
    "ipv6",
    "uuid",
    "email",
    "hostname",
    "duration",
    "uri",
    "int64",
    "foo",
]
TYPES = ["null", "boolean", "number", "integer", "string", "array", "object"]
BAD_VALUES = [
    None,
    "x",
    -1,
    [],
    {},
    2.5,
    [1],
    {"a": 1},
    [{}, 3],
    True,
    "integer",
    ["a", 2],
    1e400,
    10**400,
]

_LIST_KEYS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_MAP_KEYS = {"properties", "patternProperties", "$defs", "dependentSchemas", "definitions"}
_CLOSING = b'"}],:0123456789'


class Corpus:
    """Random schemas of one draft; ``faulty`` is the share of malformed keywords."""

    def __init__(self, seed: int, *, faulty: float = 0.02, size: int = 3) -> None:
        self._dice = random.Random(seed)
        self._faulty = faulty
        self._size = size

    def schema(self) -> dict[str, Any]:
        """Return a schema with definitions ``d``, ``e`` and ``f``."""
        schema = self._schema(self._size)
        found = schema if isinstance(schema, dict) else {"anyOf": [schema, {"type": "string"}]}
        if "$ref" in json.dumps(found):
            found["$defs"] = {name: self._schema(1) for name in "def"}
        return found

    def _schema(self, depth: int) -> Any:
        dice = self._dice
        if dice.random() < 0.08:
            return dice.choice([True, {}, False])
        found = dict[str, Any]()
        kind = dice.choice([*TYPES[:5], *["array", "object"] * (3 if depth > 0 else 0)])
        if dice.random() < 0.85:
            found["type"] = kind if dice.random() < 0.85 else [kind, dice.choice(TYPES)]
        makers = {"string": self._string, "array": self._array, "object": self._object}
        makers |= {"number": self._number, "integer": self._number}
        if kind in makers:
            found |= makers[kind](depth - 1)
        if dice.random() < 0.1:
            found |= dice.choice(
                [{"title": "t"}, {"default": 3}, {"x-y": {"not": 1}}, {"$comment": "c"}]
            )
        if dice.random() < 0.15:
            found |= self._values(kind)
        if depth > 0 and dice.random() < 0.25:
            found |= self._combined(depth - 1)
        for key in [*found]:
            if dice.random() < self._faulty:
                found[key] = dice.choice(
                    [bad for bad in BAD_VALUES if not _is_older_draft(key, bad)]
                )
        keys = [*found]
        if dice.random() < 0.3:
            dice.shuffle(keys)
        return {key: found[key] for key in keys}

    def _some(self, choices: dict[str, Any], share: float) -> dict[str, Any]:
        return {key: make() for key, make in choices.items() if self._dice.random() < share}

    def _number(self, _: int) -> dict[str, Any]:
        pick = self._dice.choice
        bounds = {
            key: lambda: pick(NUMBERS)
            for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        }
        return self._some(bounds, 0.25) | self._some(
            {"multipleOf": lambda: pick([1, 2, 0.5, 0.01, 3, 0.1, 7])}, 0.2
        )

    def _string(self, _: int) -> dict[str, Any]:
        pick = self._dice.choice
        made = self._some(
            {"minLength": lambda: pick([0, 1, 2, 3.0]), "maxLength": lambda: pick([0, 2, 3, 5])},
            0.3,
        )
        patterns = [*PATTERNS, *PATTERNS, *(BAD_PATTERNS if self._faulty else [])]
        return made | self._some(
            {"pattern": lambda: pick(patterns), "format": lambda: pick(FORMATS)}, 0.25
        )

    def _array(self, depth: int) -> dict[str, Any]:
        pick = self._dice.choice
        sizes = {"minItems": lambda: pick([0, 1, 2]), "maxItems": lambda: pick([0, 1, 2, 4])}
        rare = {
            "uniqueItems": lambda: pick([True, False]),
            "contains": lambda: self._schema(depth),
            "minContains": lambda: pick([0, 1, 2]),
            "unevaluatedItems": lambda: pick([False, True]),
        }
        prefix = {"prefixItems": lambda: [self._schema(depth) for _ in range(pick([1, 2]))]}
        items = {"items": lambda: self._schema(depth)}
        return (
            self._some(items, 0.7)
            | self._some(prefix, 0.25)
            | self._some(sizes, 0.3)
            | self._some(rare, 0.08)
        )

    def _object(self, depth: int) -> dict[str, Any]:
        dice = self._dice
        names = dice.sample(NAMES, dice.randint(1, 3))
        made = self._some(
            {"properties": lambda: {name: self._schema(depth) for name in names}}, 0.85
        )
        others = lambda: dice.choice([False, False, True, self._schema(depth)])  # noqa: E731
        made |= self._some(
            {"required": lambda: dice.sample(NAMES if dice.random() < 0.2 else names, 1)}, 0.5
        )
        made |= self._some({"additionalProperties": others}, 0.6)
        patterns = (  # noqa: E731
            lambda: {
                dice.choice(PATTERNS[:6]): self._schema(depth)
                for _ in range(dice.choice([1, 1, 2]))
            }
        )
        made |= self._some({"patternProperties": patterns}, 0.12)
        sizes = {
            "minProperties": lambda: dice.choice([0, 1, 2]),
            "maxProperties": lambda: dice.choice([1, 2, 3]),
        }
        rare = {
            "propertyNames": lambda: dice.choice(
                [{"type": "string"}, {"pattern": "^a"}, self._schema(0)]
            ),
            "dependentRequired": lambda: {names[0]: ["b"]},
            "dependentSchemas": lambda: {names[0]: self._schema(0)},
            "unevaluatedProperties": lambda: dice.choice([False, True]),
        }
        return made | self._some(sizes, 0.12) | self._some(rare, 0.08)

    def _values(self, kind: str) -> dict[str, Any]:
        dice = self._dice
        pools: dict[str, list[Any]] = {"string": STRINGS, "number": NUMBERS, "integer": NUMBERS}
        pool = pools.get(
            kind, [None, True, [], [1, "a"], {"a": 1}, {}, {"b": [True], "a": "x"}, 3, "red"]
        )
        return dice.choice([{"const": dice.choice(pool)}, {"enum": dice.sample(pool, 3)}])

    def _combined(self, depth: int) -> dict[str, Any]:
        dice = self._dice
        keyword = dice.choice(
            ["anyOf", "anyOf", "oneOf", "oneOf", "allOf", "allOf", "$ref", "not", "if"]
        )
        if keyword == "$ref":
            return {
                "$ref": dice.choice(
                    ["#/$defs/d", "#/$defs/e", "#/$defs/f", "#", "#/$defs/nowhere", "http://x/y"]
                )
            }
        if keyword == "not":
            return {"not": self._schema(depth)}
        if keyword == "if":
            return {key: self._schema(depth) for key in dice.sample(["if", "then", "else"], 2)}
        return {keyword: [self._schema(depth) for _ in range(dice.randint(1, 3))]}


def _is_older_draft(keyword: str, value: Any) -> bool:
    return (keyword == "items" and isinstance(value, list)) or (
        keyword.startswith("exclusive") and value is True
    )


def instance(schema: Any, root: Any, dice: random.Random, depth: int = 5) -> Any:
    """Return a random value that often fits a schema; whole numbers are integers, not floats."""
    return json.loads(json.dumps(_instance(schema, root, dice, depth)), parse_float=_number)


def _number(text: str) -> float:
    return int(float(text)) if float(text).is_integer() else float(text)


def _instance(schema: Any, root: Any, dice: random.Random, depth: int) -> Any:
    if not isinstance(schema, dict) or depth < 0:
        return dice.choice([None, True, 1, "a", [], {}])
    if "$ref" in schema and dice.random() < 0.8:
        name = schema["$ref"].removeprefix("#/$defs/")
        return _instance(
            root if schema["$ref"] == "#" else root["$defs"].get(name, True), root, dice, depth - 1
        )
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema and dice.random() < 0.5:
            return _instance(dice.choice(schema[keyword]), root, dice, depth - 1)
    if "const" in schema or "enum" in schema:
        return schema.get("const") if "const" in schema else dice.choice(schema["enum"])
    kinds = schema.get("type", TYPES)
    kind = dice.choice(kinds if isinstance(kinds, list) else [kinds])
    if kind == "array":
        prefix = schema.get("prefixItems", [])
        rest = [schema.get("items", True)] * dice.randint(0, 3)
        items = [*prefix, *rest][: schema.get("maxItems", dice.randint(0, 3))]
        return [_instance(item, root, dice, depth - 1) for item in items]
    if kind == "object":
        parts = {n: part for n, part in schema.get("properties", {}).items() if dice.random() < 0.7}
        required = {
            name: schema.get("properties", {}).get(name, True)
            for name in schema.get("required", [])
        }
        extra = (
            {dice.choice(NAMES): schema.get("additionalProperties", True)}
            if dice.random() < 0.3
            else {}
        )
        return {
            name: _instance(part, root, dice, depth - 1)
            for name, part in (extra | parts | required).items()
        }
    numbers = [each for each in NUMBERS if isinstance(each, int) or each != int(each)]
    near = [schema[key] for key in ("minimum", "maximum") if isinstance(schema.get(key), int)]
    formatted = {
        "date": "2024-02-29",
        "time": "10:00:00Z",
        "ipv4": "127.0.0.1",
        "ipv6": "::1",
        "email": "a@b.c",
    }
    words = [text for text in STRINGS if "\u0003" not in text] + [
        formatted.get(schema.get("format", ""), "b")
    ]
    pools: dict[str, list[Any]] = {
        "null": [None],
        "boolean": [True, False],
        "string": words,
        "number": numbers + near,
    }
    return dice.choice(pools.get(kind, [int(each) for each in numbers + near]))


def texts(schema: Any, dice: random.Random, *, longest: int = 160) -> Iterator[str]:
    """Yield random texts of a translated schema's grammar that end within ``longest`` bytes."""
    first = matcher(schema)
    end = _tokenizer().eos_token
    while True:
        follower = first.deep_copy()
        text = bytearray()
        while len(text) < longest:
            mask = int.from_bytes(follower.compute_bitmask(), "little")
            may, closing, ascii_only = _allowed_bytes(mask)
            if mask >> end & 1 and (not may or dice.random() < 0.5):
                yield text.decode()
                break
            hurry = dice.random() < 0.15 + len(text) / longest
            token = dice.choice(
                closing if closing and hurry else ascii_only if dice.random() < 0.9 else may
            )
            text.append(token)
            follower.consume_token(token)
            assert not follower.is_error(), (follower.get_error(), text)
        else:
            yield ""


@cache
def _allowed_bytes(mask: int) -> tuple[list[int], list[int], list[int]]:
    """Return the bytes that a mask of tokens allows: all, those that end a value, and printable
    ASCII, or all where none is printable.

    Few masks occur, most of them thousands of times.
    """
    may = [token for token in range(256) if mask >> token & 1]
    closing = [token for token in may if token in _CLOSING]
    ascii_only = [token for token in may if 32 <= token < 127] or may
    return may, closing, ascii_only


def matcher(schema: Any) -> LLMatcher:
    """Return a matcher for the grammar of a translated schema."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    made = LLMatcher(_tokenizer(), grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    assert not made.is_error(), made.get_error()
    return made


def matches(first: LLMatcher, value: Any) -> bool:
    """Return whether a grammar has the JSON text of a value."""
    return _has_text(first, json.dumps(value, ensure_ascii=False))


def accepts(schema: Any, text: str) -> bool:
    """Return whether the grammar of a translated schema has a text."""
    return _has_text(matcher(schema), text)


def _has_text(first: LLMatcher, text: str) -> bool:
    follower = first.deep_copy()
    tokens = [*text.encode()]
    return follower.try_consume_tokens(tokens) == len(tokens) and follower.is_accepting()


def accepts_in_some_order(schema: Any, value: Any) -> bool:
    """Return whether the grammar has a JSON text of a value, with the keys in any order."""
    first = matcher(schema)
    return any(matches(first, each) for each in islice(_orders(value), 2000))


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in permutations(value):
            yield from (
                dict(zip(names, each, strict=True))
                for each in product(*[[*_orders(value[n])] for n in names])
            )
    elif isinstance(value, list):
        yield from (list(each) for each in product(*[[*_orders(inner)] for inner in value]))
    else:
        yield value


_TOKENIZERS: list[LLTokenizer] = []


def _tokenizer() -> LLTokenizer:
    if not _TOKENIZERS:
        _TOKENIZERS.append(LLTokenizer(BYTES))
    return _TOKENIZERS[0]


def without(schema: Any, dropped: Sequence[str]) -> Any:
    """Return a schema without the keywords at some paths; a whole schema becomes ``True``."""
    found = copy.deepcopy(schema)
    for path in dropped:
        *keys, last = path.split(".")
        holder: Any = found
        above = ""
        for key in keys:
            above = key if isinstance(holder, dict) else above
            holder = (
                holder[int(key)]
                if isinstance(holder, list)
                else holder.get(key, {})
                if holder is not True
                else {}
            )
        if not path:
            return True
        if isinstance(holder, list):
            holder[int(last)] = True
        elif above in _MAP_KEYS and not _is_schema_key(keys):
            holder[last] = True
        elif isinstance(holder, dict):
            holder.pop(last, None)
    return found


def _is_schema_key(keys: Sequence[str]) -> bool:
    """Return whether the last key of a path is the name of a property, and not a keyword."""
    is_name = False
    for key in keys:
        is_name = not is_name and key in _MAP_KEYS
    return not is_name


def parse(text: str) -> Any:
    """Return the value of a JSON text; numbers beyond the range of floats are fractions."""
    return json.loads(
        text,
        parse_float=lambda digits: (
            x if isfinite(x := float(digits)) or "e" in digits.lower() else Fraction(digits)
        ),
    )


def is_valid(value: Any, schema: Any) -> bool:
    """Return whether a value fits a schema, by the ``jsonschema`` package and by the types of
    Python's library.
    """
    exact, checker = _validator()
    return bool(exact(schema, format_checker=checker).is_valid(value))


@cache
def _validator() -> tuple[Any, jsonschema.FormatChecker]:
    """Return the class of the validators, which takes a millisecond to make, and its formats."""
    exact = jsonschema.validators.extend(
        jsonschema.Draft202012Validator,
        {"multipleOf": _multiple, "pattern": _pattern, "maxLength": _longest},
    )
    checker = jsonschema.FormatChecker([])
    for name, check in FORMAT_CHECKS.items():
        checker.checks(name)(check)
    return exact, checker


def _longest(_: Any, most: float, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and len(value) > most:
        yield jsonschema.ValidationError("too long")


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and not re.search(pattern.replace("$", r"\Z"), value, re.ASCII):
        yield jsonschema.ValidationError(f"{value} does not match {pattern}")


def _multiple(_: Any, of: float, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    is_number = (
        isinstance(value, int | float | Fraction)
        and not isinstance(value, bool)
        and abs(value) != inf
    )
    if is_number and Fraction(str(value)) % Fraction(str(of)):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {of}")


def _date(text: str) -> bool:
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) and dt.date.fromisoformat(text))


def _time(text: str) -> bool:
    found = re.fullmatch(
        r"(\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)", text, re.ASCII | re.IGNORECASE
    )
    if found is None:
        return False
    clock = found[1]
    zone = found[3].upper().replace("Z", "+00:00")
    if clock.endswith(":60"):  # 23:59:60 UTC
        moment = dt.datetime.fromisoformat(f"2000-01-01T{clock[:6]}59{zone}").astimezone(dt.UTC)
        return (moment.hour, moment.minute) == (23, 59)
    return dt.time.fromisoformat(f"{clock}{zone}") is not None


def _date_time(text: str) -> bool:
    return _date(text[:10]) and text[10:11] in ("T", "t") and _time(text[11:])


def _email(text: str) -> bool:
    local, _, domain = text.rpartition("@")
    return (
        bool(local and domain) and (len(local) <= 64 or local.startswith('"')) and " " not in domain
    )


def _hostname(text: str) -> bool:
    labels = text.split(".")
    return len(text) <= 253 and all(
        re.fullmatch(r"(?!-)[a-z0-9-]{1,63}(?<!-)", label, re.IGNORECASE | re.ASCII)
        for label in labels
    )


def _uuid(text: str) -> bool:
    return str(uuid.UUID(text)) == text.lower()


def _uri(text: str) -> bool:
    """Check a text by the expression of RFC 3986, appendix B, and the characters of each part."""
    found = re.fullmatch(r"([^:/?#]+):(//[^/?#]*)?([^?#]*)(\?[^#]*)?(#.*)?", text, re.DOTALL)
    if found is None or not re.fullmatch(r"[a-z][a-z0-9+.-]*", found[1], re.IGNORECASE | re.ASCII):
        return False
    host = re.search(r"\[(.*)\]", found[2] or "")
    if host and not host[1].lower().startswith("v"):
        ipaddress.IPv6Address(host[1])
    rest = re.sub(
        r"%[0-9a-f]{2}", "", text.replace(host[0] if host else "\0", ""), flags=re.IGNORECASE
    )
    return (
        bool(re.fullmatch(r"[a-z0-9._~!$&'()*+,;=:@/?#-]*", rest, re.IGNORECASE | re.ASCII))
        and rest.count("#") <= 1
    )


def _duration(text: str) -> bool:
    found = re.fullmatch(
        r"P(?:(\d+W)|(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?)", text, re.ASCII
    )
    return bool(found) and text[-1] not in "PT"


FORMAT_CHECKS = {
    "date": _date, "time": _time, "date-time": _date_time, "email": _email,
    "hostname": _hostname, "uuid": _uuid,
    "ipv4": lambda text: bool(ipaddress.IPv4Address(text)), "uri": _uri, "duration": _duration,
    "ipv6": lambda text: "%" not in text and bool(ipaddress.IPv6Address(text)),
}  # fmt: skip
for _name, _check in [*FORMAT_CHECKS.items()]:

    def _quiet(text: Any, check: Any = _check) -> bool:
        try:
            return not isinstance(text, str) or check(text)
        except ValueError:
            return False

    FORMAT_CHECKS[_name] = _quiet
