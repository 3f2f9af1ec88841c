"""Arguments of calls in Python's syntax, as LFM2 writes them: ``f(city="Oslo", exact=True)``.

:class:`KeywordArguments` converts arguments to JSON while the model writes them, one argument at a
time. A value is a literal of Python or JSON; any other value becomes a string. An argument without
a name gets its number as its name. :class:`KeywordSyntax` has the grammar that forces such
arguments, and :func:`write_call` writes the calls of earlier messages.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pronk.text.chat.arguments import (
    ArgumentReader,
    ArgumentSyntax,
    NamedArguments,
    NamedRules,
    with_shared,
)
from pronk.text.chat.symbols import TokenSymbols

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


@dataclass(frozen=True)
class KeywordSyntax(ArgumentSyntax):
    """Arguments in Python's syntax, up to the closing parenthesis: ``city="Oslo", exact=True)``."""

    def reader(self, schema: Mapping[str, Any], symbols: TokenSymbols) -> ArgumentReader:
        """Return a reader that converts one call's arguments to JSON."""
        del schema, symbols
        return KeywordArguments()

    def rules(
        self, rule: str, schema: str, values: dict[str, str], symbols: TokenSymbols
    ) -> list[str]:
        """Return the Lark rules for the arguments and for the closing parenthesis."""
        del symbols
        return keyword_rules(rule, schema, values)

    def not_followed(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the paths of the keywords of a schema that the grammar does not enforce.

        For example, properties whose names are not identifiers have no place in Python's syntax.
        """
        return NamedArguments.of(schema, str.isidentifier).not_followed


def keyword_rules(rule: str, schema: str, values: dict[str, str] | None = None) -> list[str]:
    """Return the Lark rules for keyword arguments of a schema and for the closing parenthesis.

    Arguments are those of :meth:`ArgumentSyntax.rules`.
    """
    rules = NamedRules(
        key=lambda name: json.dumps(f"{name}="),
        any_key=_ANY_NAME,
        value=_value,
        separator='", "',
        end='")"',
    )
    arguments = NamedArguments.of(json.loads(schema), str.isidentifier)
    return rules.build(rule, arguments, {} if values is None else values)


def _value(schema: Any, shared: Mapping[str, Any]) -> str:
    """Return the Lark expression for the value of an argument whose schema is ``schema``.

    It is ``"True" | "False"`` for a boolean, as in Python, and JSON for all other types. ``shared``
    are the definitions and options that the schema needs as well.
    """
    keywords = schema if isinstance(schema, Mapping) else {}
    if keywords.get("type") == "boolean" and not {"const", "enum"} & {*keywords}:
        return '"True" | "False"'
    return f"%json {json.dumps(with_shared(schema, shared), ensure_ascii=False)}"
