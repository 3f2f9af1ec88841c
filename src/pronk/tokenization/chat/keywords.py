"""Arguments of calls in Python's syntax, as LFM2 writes them: ``f(city="Oslo", exact=True)``.

:class:`KeywordArguments` converts arguments to JSON while the model writes them, one argument at a time. A value is a
literal of Python or JSON; any other value becomes a string. An argument without a name gets its number as its name.
:func:`keyword_rules` returns the grammar that guides them, and :func:`write_call` writes calls of earlier messages.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from pronk.errors import OptionError, refuse

_NAMED = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")
_SPECIAL = re.compile("[\ud800-\udfff]")  # symbols of special tokens
_MARKS = re.compile(r"""["'()\[\]{},]""")
# A string, which is not changed, or a constant of JSON.
_CONSTANTS = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|\b(true|false|null)\b""", re.DOTALL)
_PYTHON = {"true": "True", "false": "False", "null": "None"}
# Backslashes that begin no escape of a Python string; Python would warn of them.
_NO_ESCAPE = re.compile(r"""(\\[\\'"abfnrtvxuUN0\n])|\\""")
# Keys of a schema that the grammar follows or that constrain nothing.
_KNOWN_KEYS = frozenset(
    "type properties required additionalProperties description title $defs definitions $schema $id examples default "
    "x-guidance".split()
)


class KeywordArguments:
    """Incremental conversion of the text after a call's opening parenthesis."""

    def __init__(self) -> None:
        self.found = False  # whether the closing parenthesis was read
        self._quote, self._escaped, self._depth = "", False, 0
        self._argument: list[str] = []  # pieces of the argument that is being read
        self._names: set[str] = set()

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read from an offset up to the end of the arguments or of the text; return the next offset, and JSON."""
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
            mark, at = match[0], match.end()
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
            character, at = text[at], at + 1
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        self._argument.append(text[start:at])
        return at

    def _take_argument(self) -> str:
        """Return the JSON of the argument read last, with the braces and commas around it."""
        argument, self._argument = _SPECIAL.sub("", "".join(self._argument)), []
        written, opening = "", "" if self._names else "{"
        if argument.strip():
            match = _NAMED.match(argument)
            name = str(len(self._names)) if match is None else match[1]
            value = argument if match is None else argument[match.end() :]
            written = f"{', ' if self._names else opening}{json.dumps(name)}: {_json(value.strip())}"
            opening = ""
            self._names.add(name)
        return f"{written}{opening}}}" if self.found else written


def _json(value: str) -> str:
    """Return a value of Python or JSON as JSON; a string if it is neither."""
    python = _CONSTANTS.sub(lambda match: _PYTHON[match[2]] if match[2] else _escaped(match[1]), value)
    for parse, text in ((json.loads, value), (ast.literal_eval, python)):
        try:
            found = json.dumps(parse(text), ensure_ascii=False, allow_nan=False)
            found.encode()  # an escaped half of a character raises a ValueError
            return found
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return json.dumps(value, ensure_ascii=False)


def _escaped(string: str) -> str:
    """Return the literal of a string with backslashes doubled that begin no escape."""
    return _NO_ESCAPE.sub(lambda match: match[1] or "\\\\", string)


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call, such as ``f(city="Oslo", exact=True)``."""
    return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in arguments.items())})"


def _literal(value: object) -> str:
    """Return a literal of Python, with strings in double quotes as JSON writes them."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def keyword_rules(rule: str, schema: str) -> list[str]:
    """Return the rules for keyword arguments that fit a schema, and for the closing parenthesis.

    The arguments are in the order of the schema's properties.

    Example, for an optional ``a`` and a required ``b``::

        args: "a=" args_0 args_after_1 | "b=" args_1 ")"
        args_after_1: ", b=" args_1 ")"
        args_0: %json {…}

    Raises:
        OptionError: the schema has a key that such rules cannot follow.
    """
    root = json.loads(schema)
    properties, required = root.get("properties", {}), root.get("required", [])
    unknown = [key for key in root if key not in _KNOWN_KEYS]
    unnamed = [name for name in [*properties, *required] if not (name in properties and name.isidentifier())]
    if unknown or unnamed:
        found = f"the key {unknown[0]!r:.60}" if unknown else f"the argument {unnamed[0]!r:.60}"
        expected = "'properties' whose names are identifiers, and no other constraints, as calls are in Python's syntax"
        refuse("guide: json", f"expected {expected}, found {found}; change the schema of the tool", OptionError)
    names, shared = [*properties], {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    rules, first = list[str](), list[str]()
    for number, name in enumerate(names):
        after = f"{rule}_after_{number + 1}" if number + 1 < len(names) else '")"'
        rules.append(f"{rule}_{number}: {_value(properties[name], shared)}")
        if all(earlier not in required for earlier in names[:number]):
            first.append(f"{json.dumps(f'{name}=')} {rule}_{number} {after}")
        if number:
            written = f"{json.dumps(f', {name}=')} {rule}_{number} {after}"
            rules.append(f"{rule}_after_{number}: {written}" + ("" if name in required else f" | {after}"))
    if not set(names) & {*required}:
        first.append('")"')
    return [f"{rule}: {' | '.join(first)}", *rules]


def _value(schema: object, shared: Mapping[str, Any]) -> str:
    """Return the expression for a value: of JSON, but booleans as Python writes them."""
    if isinstance(schema, Mapping) and schema.get("type") == "boolean" and not {"const", "enum"} & {*schema}:
        return '"True" | "False"'
    return f"%json {json.dumps({**schema, **shared} if isinstance(schema, Mapping) else shared, ensure_ascii=False)}"
