"""Arguments of calls in Python's syntax, as LFM2 writes them: ``f(city="Oslo", exact=True)``.

:class:`KeywordArguments` converts arguments to JSON while the model writes them, one argument at a
time. A value is a literal of Python or JSON; any other value becomes a string. An argument without
a name gets its number as its name. :func:`keyword_rules` returns the grammar that forces such
arguments, and :func:`write_call` writes the calls of earlier messages.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pronk.text.json_schema.trial import accepts

_NAMED = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")
_SPECIAL = re.compile("[\ud800-\udfff]")  # lone surrogates, which stand for special tokens
_MARKS = re.compile(r"""["'()\[\]{},]""")
# In a text of arguments: a string literal, or a constant of JSON outside strings.
_CONSTANTS = re.compile(
    r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|\b(true|false|null)\b""", re.DOTALL
)
_PYTHON = {"true": "True", "false": "False", "null": "None"}
# In a string literal: an escape of Python, or a backslash that begins no escape, of which Python
# would warn.
_NO_ESCAPE = re.compile(r"""(\\[\\'"abfnrtvxuUN0\n])|\\""")

# Lark expression for the name of an argument that may have any name
_ANY_NAME = '/[a-zA-Z_][a-zA-Z_0-9]{0,63}/ "="'

# Keywords of a translated schema that the grammar of keyword arguments does not enforce.
_CONSTRAINTS = frozenset(
    {"allOf", "anyOf", "$ref", "const", "enum", "minProperties", "maxProperties"}
)


class KeywordArguments:
    """Incremental conversion of a call's arguments from Python's syntax to JSON.

    The text that it reads begins after the opening parenthesis of the call.
    """

    def __init__(self) -> None:
        self.found = False  # whether the closing parenthesis was read
        self._quote = ""  # quotation mark of the string that is being read; empty outside strings
        self._escaped = False  # whether the next character is escaped by a backslash
        self._depth = 0  # number of brackets that are open
        self._argument: list[str] = []  # pieces of the text of the argument that is being read
        self._names: set[str] = set()  # names of the arguments that are complete

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read ``text`` from the offset ``at`` up to the closing parenthesis or its end.

        Returns:
            The offset after the characters read, and the JSON of the arguments that ended in them.
        """
        written = ""
        while at < len(text) and not self.found:
            if self._quote:
                at = self._read_string(text, at)
                continue
            match = _MARKS.search(text, at)
            stop = len(text) if match is None else match.start()
            self._argument.append(text[at:stop])
            at = stop
            if match is None:
                break
            mark = match[0]
            at = match.end()
            if self._depth == 0 and mark in ",)":
                self.found = mark == ")"
                written += self._take_argument()
                continue
            self._argument.append(mark)
            if mark in "\"'":
                self._quote = mark
            else:
                self._depth += mark in "([{"
                self._depth -= mark in ")]}" and self._depth > 0
        return at, written

    def _read_string(self, text: str, at: int) -> int:
        start = at
        while at < len(text) and self._quote:
            character = text[at]
            at += 1
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        self._argument.append(text[start:at])
        return at

    def _take_argument(self) -> str:
        """Return the JSON of the argument read last: ``{"a": 1``, or ``, "b": 2`` if not the first.

        After the closing parenthesis, the closing brace follows.
        """
        argument = _SPECIAL.sub("", "".join(self._argument))
        self._argument = []
        written = ""
        opening = "" if self._names else "{"
        if argument.strip():
            match = _NAMED.match(argument)
            name = str(len(self._names)) if match is None else match[1]
            value = argument if match is None else argument[match.end() :]
            before = ", " if self._names else "{"
            written = f"{before}{json.dumps(name)}: {_json(value.strip())}"
            opening = ""
            self._names.add(name)
        return f"{written}{opening}}}" if self.found else written


def _json(value: str) -> str:
    """Return the JSON of an argument's value.

    The value is a literal of Python or JSON; any other text becomes a JSON string.
    """
    python = _CONSTANTS.sub(
        lambda match: _PYTHON[match[2]] if match[2] else _escaped(match[1]), value
    )
    for parse, text in ((json.loads, value), (ast.literal_eval, python)):
        try:
            found = json.dumps(parse(text), ensure_ascii=False, allow_nan=False)
            found.encode()  # raises a ValueError for half a character (a lone surrogate)
            return found
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return json.dumps(value, ensure_ascii=False)


def _escaped(string: str) -> str:
    """Return a Python string literal in which a backslash that begins no escape is doubled.

    Python would warn of such a backslash.
    """
    return _NO_ESCAPE.sub(lambda match: match[1] or "\\\\", string)


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a call in Python's syntax, such as ``f(city="Oslo", exact=True)``."""
    written = [f"{key}={_literal(value)}" for key, value in arguments.items()]
    return f"{name}({', '.join(written)})"


def _literal(value: object) -> str:
    """Return a literal of Python for a JSON value, with strings in double quotes as in JSON."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        entries = [f"{_literal(key)}: {_literal(each)}" for key, each in value.items()]
        return f"{{{', '.join(entries)}}}"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def keyword_rules(rule: str, schema: str, values: dict[str, str] | None = None) -> list[str]:
    """Return the Lark rules for keyword arguments of a schema and for the closing parenthesis.

    The arguments are in the order of the schema's properties. The rules enforce ``required`` and
    the schemas of the properties; :func:`not_followed` returns the keywords that they do not
    enforce. If any object fits the schema, the arguments may have any names.

    Example, for an optional ``a`` and a required ``b`` of one type::

        args: "a=" value_0 args_after_1 | "b=" value_0 ")"
        args_after_1: ", b=" value_0 ")"
        value_0: %json {…}

    Args:
        rule: name of the first rule.
        schema: schema of an object, translated by :mod:`pronk.text.json_schema`.
        values: names of the rules for values, by the rules' Lark expressions. All tools of a
            grammar share this dictionary and its rules; the call adds new ones to it.
    """
    arguments = _Arguments.of(json.loads(schema))
    values = {} if values is None else values
    names = [*arguments.values]
    required = arguments.required
    rules = list[str]()
    first = list[str]()

    def value(schema: object) -> str:
        expression = _value(schema, arguments.shared)
        if expression not in values:
            values[expression] = f"value_{len(values)}"
            rules.append(f"{values[expression]}: {expression}")
        return values[expression]

    if arguments.others is not None:
        argument = f"{_ANY_NAME} {value(arguments.others)}"
        rules.append(f"{rule}_any: {argument}")
        first.append(f'{rule}_any (", " {rule}_any)* ")"')
    for number, name in enumerate(names):
        after = f"{rule}_after_{number + 1}" if number + 1 < len(names) else '")"'
        text = value(arguments.values[name])
        if all(earlier not in required for earlier in names[:number]):
            first.append(f"{json.dumps(f'{name}=')} {text} {after}")
        if number:
            written = f"{json.dumps(f', {name}=')} {text} {after}"
            skipped = "" if name in required else f" | {after}"
            rules.append(f"{rule}_after_{number}: {written}{skipped}")
    if not required:
        first.append('")"')
    return [f"{rule}: {' | '.join(first)}", *rules]


def not_followed(schema: Mapping[str, Any]) -> list[str]:
    """Return the paths of the keywords of a schema that :func:`keyword_rules` does not enforce.

    For example, properties whose names are not identifiers have no place in Python's syntax.
    """
    return _Arguments.of(schema).not_followed


@dataclass(frozen=True)
class _Arguments:
    """Arguments of a tool in Python's syntax, read from the schema of the tool's arguments.

    Attributes:
        values: schema of each argument's value, by the argument's name.
        required: names of arguments that a call must have.
        others: schema of the values of arguments with any names; ``None`` if a call has arguments
            with the given names only.
        shared: keys of the schema that each value's schema needs as well: definitions and options.
        not_followed: paths of the keywords of the schema that the grammar does not enforce.
    """

    values: Mapping[str, Any]
    required: Collection[str]
    others: Mapping[str, Any] | bool | None
    shared: Mapping[str, Any]
    not_followed: list[str]

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> _Arguments:
        """Return the arguments that the translated schema of an object allows."""
        shared = {key: schema[key] for key in ("$defs", "x-guidance") if key in schema}
        root = {key: value for key, value in schema.items() if key not in shared}
        while {*root} <= {"type", "$ref"} and "$ref" in root:
            target = schema["$defs"][root["$ref"].removeprefix("#/$defs/")]
            root = {} if isinstance(target, bool) else target
        properties = root.get("properties", {})
        all_required = root.get("required", [])
        others = root.get("additionalProperties", True) or True
        values = {name: properties.get(name, others) for name in [*properties, *all_required]}
        followed = {
            name: value
            for name, value in values.items()
            if name.isidentifier() and _is_possible(value, shared)
        }
        required = [name for name in all_required if name in followed]
        left_out = [key for key in root if key in _CONSTRAINTS]
        if len(required) < len(all_required):
            left_out.append("required")
        left_out += [f"properties.{name}" for name in values if not name.isidentifier()]
        allows_any = (
            values == {}
            and "patternProperties" not in root
            and root.get("additionalProperties") is not False
        )
        return cls(followed, required, others if allows_any else None, shared, left_out)


def _is_possible(schema: Any, shared: Mapping[str, Any]) -> bool:
    """Return whether some value matches a property's schema; llguidance compiles it to find out.

    ``shared`` are the definitions and options that the schema needs as well.
    """
    return schema is not False and accepts(_with_shared(schema, shared))


def _value(schema: object, shared: Mapping[str, Any]) -> str:
    """Return the Lark expression for the value of an argument whose schema is ``schema``.

    It is ``"True" | "False"`` for a boolean, as in Python, and JSON for all other types. ``shared``
    are the definitions and options that the schema needs as well.
    """
    keywords = schema if isinstance(schema, Mapping) else {}
    if keywords.get("type") == "boolean" and not {"const", "enum"} & {*keywords}:
        return '"True" | "False"'
    return f"%json {json.dumps(_with_shared(schema, shared), ensure_ascii=False)}"


def _with_shared(schema: object, shared: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, **shared} if isinstance(schema, Mapping) else {**shared}
