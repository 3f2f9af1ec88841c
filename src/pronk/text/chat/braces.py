"""Arguments in Gemma 4's syntax: JSON without spaces, with other quotation marks.

``{"city": "Oslo", "days": [1, 2]}`` is written ``{city:<|"|>Oslo<|"|>,days:[1,2]}``: names have no
quotation marks, and strings stand between two tokens ``<|"|>`` without any escapes.
:class:`BraceArguments` converts such arguments to JSON while the model writes them. The grammar
enforces types, enumerations, required names and the structure of lists and objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pronk.text.chat.arguments import (
    ALL_TYPES,
    ArgumentReader,
    ArgumentSyntax,
    NamedArguments,
    NamedRules,
    definition,
    types_of,
)
from pronk.text.chat.symbols import TokenSymbols, plain_text
from pronk.text.stream import prefix_at_end

QUOTE = '<|"|>'  # mark before and after a string
_NAME = re.compile(r"[^\s{}\[\]:,<>\"|]{1,128}")  # names that need no quotation marks
_ANY_NAME = "/[a-zA-Z_][a-zA-Z_0-9.-]{0,63}/"
_NUMBER = "/-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,15})?([eE][+-]?[0-9]{1,3})?/"
# Keywords for numbers; llguidance enforces them, as numbers have the text of JSON.
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_DEPTH = 8  # depth of schemas beyond which the grammar allows any value
# Keywords of a translated schema that the grammar enforces, or that only hold other schemas.
_FOLLOWED = frozenset(
    {"type", "properties", "required", "additionalProperties", "patternProperties", "items"}
    | {"enum", "const", "anyOf", "$ref", "$defs", "x-guidance", *_NUMERIC}
)


@dataclass(frozen=True)
class BraceSyntax(ArgumentSyntax):
    """Arguments in Gemma 4's syntax, from after the opening brace up to the closing brace."""

    def reader(self, schema: Mapping[str, Any], symbols: TokenSymbols) -> ArgumentReader:
        """Return a reader that converts one call's arguments to JSON."""
        del schema
        return BraceArguments(symbols)

    def rules(
        self, rule: str, schema: str, values: dict[str, str], symbols: TokenSymbols
    ) -> list[str]:
        """Return the Lark rules for the arguments and for the closing brace."""
        shared_values = _Values(symbols, values)
        arguments = NamedArguments.of(json.loads(schema), _NAME.fullmatch)
        return shared_values.object_rules(rule, arguments, 0) + shared_values.rules

    def shared_rules(self, symbols: TokenSymbols) -> list[str]:
        """Return the rules of a string and of any value."""
        quote = symbols.grammar(QUOTE)
        rules = list[str]()
        alternatives = list[str]()
        if QUOTE in symbols.id_only:
            alternatives.append(f"{quote} TEXT {quote}")
        if QUOTE not in symbols.of_marker:
            alternatives.append(f"{json.dumps(QUOTE)} quoted_end")
            rules.append(f"quoted_end[lazy]: TEXT {json.dumps(QUOTE)}")
        return [
            f"quoted: {' | '.join(alternatives)}",
            *rules,
            f'any_value: quoted | {_NUMBER} | "true" | "false" | "null" | any_list | any_object',
            'any_list: "[" (any_value ("," any_value)*)? "]"',
            f'any_entry: {_ANY_NAME} ":" any_value',
            'any_object: "{" (any_entry ("," any_entry)*)? "}"',
        ]

    def not_followed(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the paths of the keywords of a schema that the grammar does not enforce."""
        arguments = NamedArguments.of(schema, _NAME.fullmatch)
        paths = [*arguments.not_followed]
        for name, value in arguments.values.items():
            if not _is_followed(value, arguments.shared, 0):
                paths.append(f"properties.{name}")
        return paths


def _is_followed(schema: Any, shared: Mapping[str, Any], depth: int) -> bool:
    """Return whether the grammar enforces all keywords of a value's schema."""
    if not isinstance(schema, Mapping):
        return True
    if depth > _MAX_DEPTH or not {*schema} <= _FOLLOWED:
        return False
    parts = [*schema.get("anyOf", ()), *schema.get("properties", {}).values()]
    parts += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    if "$ref" in schema:
        parts.append(definition(schema["$ref"], shared))
    return all(_is_followed(part, shared, depth + 1) for part in parts)


@dataclass
class _Values:
    """Builder of the Lark rules for values.

    Attributes:
        symbols: symbols of the model's tokens.
        names: names of the rules for values, by the rules' Lark expressions.
        rules: rules of objects within values.
    """

    symbols: TokenSymbols
    names: dict[str, str]
    rules: list[str] = field(default_factory=list)

    def object_rules(self, rule: str, arguments: NamedArguments, depth: int) -> list[str]:
        """Return the rules for the entries of an object and its closing brace."""
        rules = NamedRules(
            key=lambda name: json.dumps(f"{name}:", ensure_ascii=False),
            any_key=f'{_ANY_NAME} ":"',
            value=lambda schema, shared: self.value(schema, shared, depth + 1),
            separator='","',
            end='"}"',
        )
        return rules.build(rule, arguments, self.names)

    def value(self, schema: Any, shared: Mapping[str, Any], depth: int) -> str:
        """Return the Lark expression for a value of a schema."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "any_value"
        if "$ref" in schema:
            return self.value(definition(schema["$ref"], shared), shared, depth + 1)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return f"({' | '.join(self.symbols.grammar(write(each)) for each in values)})"
        if "anyOf" in schema:
            parts = [self.value(each, shared, depth + 1) for each in schema["anyOf"]]
            return f"({' | '.join(dict.fromkeys(parts))})"
        types = types_of(schema, shared)
        if types == ALL_TYPES:
            return "any_value"
        return (
            f"({' | '.join(self._of_type(name, schema, shared, depth) for name in sorted(types))})"
        )

    def _of_type(
        self, name: str, schema: Mapping[str, Any], shared: Mapping[str, Any], depth: int
    ) -> str:
        """Return the Lark expression for the values of one type."""
        if name == "array":
            item = self.value(schema.get("items", True), shared, depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        if name == "object":
            has_names = bool(schema.get("properties") or schema.get("required"))
            if not has_names and schema.get("additionalProperties", True) is True:
                return "any_object"
            entries = NamedArguments.of({**schema, **shared}, _NAME.fullmatch)
            key = f"object {json.dumps(schema, sort_keys=True)}"
            if key not in self.names:
                self.names[key] = f"object_{len(self.names)}"
                self.rules += self.object_rules(self.names[key], entries, depth)
            return f'"{{" {self.names[key]}'
        if name in ("integer", "number"):
            limits = {key: schema[key] for key in _NUMERIC if key in schema}
            return f"%json {json.dumps({'type': name, **limits, **shared}, ensure_ascii=False)}"
        simple = {
            "string": "quoted",
            "boolean": '"true" | "false"',
            "null": '"null"',
        }
        return simple[name]


def write(value: object) -> str:
    """Return the text of a JSON value in Gemma 4's syntax, with sorted names as its template."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        entries = [f"{name}:{write(value[name])}" for name in sorted(value)]
        return f"{{{','.join(entries)}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(map(write, value))}]"
    return json.dumps(value)


class BraceArguments:
    """Incremental conversion of a call's arguments from Gemma 4's syntax to JSON.

    The text that it reads begins after the opening brace. Strings are emitted while they are
    written, other values once they are complete.

    Args:
        symbols: symbols of the model's tokens.
    """

    def __init__(self, symbols: TokenSymbols) -> None:
        self.found = False  # whether the closing brace of the arguments was read
        self._quote = symbols.of_text(QUOTE)
        self._marks = re.compile(f"{re.escape(self._quote)}|[][{{}}:,]")
        self._open = ["{"]  # brackets that are open
        self._in_string = False
        self._held = ""  # text whose meaning later text decides
        self._word = ""  # the name, number or constant that is being read
        self._is_begun = False  # whether the opening brace was emitted

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read ``text`` from the offset ``at`` up to the closing brace or its end.

        Returns:
            The offset after the characters read, and the JSON of the arguments that is now certain.
        """
        num_held = len(self._held)
        symbols = self._held + text[at:]
        written = [] if self._is_begun else ["{"]
        self._is_begun = True
        place = 0
        while not self.found:
            mark = self._marks.search(symbols, place)
            if self._in_string:
                place = self._read_string(symbols, place, written)
                if self._in_string:
                    break
                continue
            if mark is None:
                rest = prefix_at_end(symbols[place:], self._quote)
                self._word += symbols[place : len(symbols) - len(rest)]
                self._held = rest
                break
            self._word += symbols[place : mark.start()]
            place = mark.end()
            self._read_mark(mark[0], written)
        if not self.found:
            return len(text), "".join(written)
        self._held = ""
        return at + place - num_held, "".join(written)

    def _read_string(self, symbols: str, place: int, written: list[str]) -> int:
        """Read a string up to its end, or as far as it was written; return the next offset."""
        stop = symbols.find(self._quote, place)
        self._held = "" if stop >= 0 else prefix_at_end(symbols[place:], self._quote)
        end = stop if stop >= 0 else len(symbols) - len(self._held)
        written.append(_escaped(symbols[place:end]))
        if stop < 0:
            return end
        self._in_string = False
        written.append('"')
        return stop + len(self._quote)

    def _read_mark(self, mark: str, written: list[str]) -> None:
        """Emit the word before a mark, and the mark."""
        word = plain_text(self._word).strip()
        self._word = ""
        if mark == ":" and self._open[-1] == "{":
            written.append(f'"{_escaped(word)}": ')
            return
        if word:
            written.append(_constant(word))
        if mark == self._quote:
            self._in_string = True
            written.append('"')
        elif mark in "{[":
            self._open.append(mark)
            written.append(mark)
        elif mark == ",":
            written.append(", ")
        elif mark in "}]":
            written.append("}" if self._open.pop() == "{" else "]")
            self.found = not self._open


def _constant(word: str) -> str:
    """Return the JSON of a number or constant; of another word, the string."""
    try:
        return json.dumps(json.loads(word, parse_constant=int))
    except (ValueError, RecursionError):
        return json.dumps(word, ensure_ascii=False)


def _escaped(symbols: str) -> str:
    """Return a piece of a string as it stands in JSON, without the symbols of special tokens."""
    return json.dumps(plain_text(symbols), ensure_ascii=False)[1:-1]
