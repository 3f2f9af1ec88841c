"""Syntaxes of a call's arguments: the interface, JSON, and rules that other syntaxes share.

A dialect writes the arguments of a call as a JSON object, or in a syntax of its own. An
:class:`ArgumentSyntax` converts the arguments to JSON while the model writes them, and has the
grammar that forces them. The other syntaxes are in :mod:`pronk.text.chat.keywords`,
:mod:`pronk.text.chat.tagged` and :mod:`pronk.text.chat.braces`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pronk.text.chat.symbols import TokenSymbols
from pronk.text.json_schema.trial import accepts

# Characters that matter outside JSON strings: they begin a string or change the nesting.
_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
# Characters that matter within a JSON string: they end it or escape the next character.
_INSIDE_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Incremental search for the end of a JSON object or list in a streamed text.

    The text begins with the opening bracket of the object or list.
    """

    def __init__(self) -> None:
        self._depth = 0  # number of open brackets
        self._quoted = False  # whether the next character is within a string
        self._escaped = False  # whether the next character is escaped by a backslash

    @property
    def found(self) -> bool:
        """Whether all brackets were closed, so that the object or list is complete."""
        return self._depth == 0

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read ``text`` from the offset ``at`` up to the bracket that closes the object or list.

        Without that bracket, read to the end of the text.

        Returns:
            The offset after the characters read, and these characters.
        """
        stop = at
        while stop < len(text):
            if self._escaped:
                self._escaped = False
                stop += 1
                continue
            pattern = _INSIDE_STRING if self._quoted else _OUTSIDE_STRING
            match = pattern.search(text, stop)
            if match is None:
                return len(text), text[at:]
            mark = match[0]
            stop = match.end()
            if mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if mark in "{[" else -1
                if self.found:
                    break
        return stop, text[at:stop]


class ArgumentReader(Protocol):
    """Incremental conversion of one call's arguments to JSON."""

    @property
    def found(self) -> bool:
        """Whether the end of the arguments was read."""
        ...

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read ``text`` from the offset ``at`` up to the end of the arguments or of the text.

        Returns:
            The offset after the characters read, and the JSON of the arguments that is now certain.
        """
        ...


class ArgumentSyntax(ABC):
    """Syntax in which a model writes the arguments of a call.

    Attributes:
        opening: text with which all arguments begin; the reader gets it first.
    """

    opening: ClassVar[str] = ""

    @abstractmethod
    def reader(self, schema: Mapping[str, Any], symbols: TokenSymbols) -> ArgumentReader:
        """Return a reader of one call's arguments.

        Args:
            schema: schema of the arguments, translated by :mod:`pronk.text.json_schema`.
            symbols: symbols of the model's tokens; the reader gets symbols.
        """

    @abstractmethod
    def rules(
        self, rule: str, schema: str, values: dict[str, str], symbols: TokenSymbols
    ) -> list[str]:
        """Return the Lark rules for the arguments, up to and including their end.

        Args:
            rule: name of the first rule.
            schema: JSON text of the schema of the arguments.
            values: names of the rules for values, by the rules' Lark expressions. All tools of a
                grammar share this dictionary and its rules; the call adds new ones to it.
            symbols: symbols of the model's tokens.
        """

    def shared_rules(self, symbols: TokenSymbols) -> list[str]:
        """Return the Lark rules that the arguments of all tools of a grammar need, once."""
        del symbols
        return []

    def not_followed(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the paths of the keywords of a schema that :meth:`rules` do not enforce."""
        del schema
        return []


@dataclass(frozen=True)
class JsonSyntax(ArgumentSyntax):
    """Arguments as a JSON object, ``{"city": "Oslo"}``."""

    opening = "{"

    def reader(self, schema: Mapping[str, Any], symbols: TokenSymbols) -> ArgumentReader:
        """Return a search for the end of the object."""
        del schema, symbols
        return JsonEnd()

    def rules(
        self, rule: str, schema: str, values: dict[str, str], symbols: TokenSymbols
    ) -> list[str]:
        """Return the Lark rule for an object of the schema."""
        del values, symbols
        return [f"{rule}: %json {schema}"]


# Keywords of a translated schema of an object that the grammars of named arguments do not enforce.
_CONSTRAINTS = frozenset(
    {"allOf", "anyOf", "$ref", "const", "enum", "minProperties", "maxProperties"}
)


@dataclass(frozen=True)
class NamedArguments:
    """Arguments of a tool, read from the schema of the tool's arguments.

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
    def of(cls, schema: Mapping[str, Any], is_name: Callable[[str], object]) -> NamedArguments:
        """Return the arguments that the translated schema of an object allows.

        Arguments whose name fails ``is_name`` have no place in the syntax, and are left out.
        """
        shared = {key: schema[key] for key in ("$defs", "x-guidance") if key in schema}
        root = {key: value for key, value in schema.items() if key not in shared}
        while {*root} <= {"type", "$ref"} and "$ref" in root:
            target = definition(root["$ref"], shared)
            root = {} if isinstance(target, bool) else target
        properties = root.get("properties", {})
        all_required = root.get("required", [])
        others = root.get("additionalProperties", True) or True
        values = {name: properties.get(name, others) for name in [*properties, *all_required]}
        followed = {
            name: value
            for name, value in values.items()
            if is_name(name) and _is_possible(value, shared)
        }
        required = [name for name in all_required if name in followed]
        left_out = [key for key in root if key in _CONSTRAINTS]
        if len(required) < len(all_required):
            left_out.append("required")
        left_out += [f"properties.{name}" for name in values if not is_name(name)]
        allows_any = (
            values == {}
            and "patternProperties" not in root
            and root.get("additionalProperties") is not False
        )
        return cls(followed, required, others if allows_any else None, shared, left_out)

    def value_schema(self, name: str) -> Any:
        """Return the schema of the argument ``name``; ``True``, any value, if it has none."""
        return self.values.get(name, True if self.others is None else self.others)


def definition(reference: str, shared: Mapping[str, Any]) -> Any:
    """Return the schema to which a reference such as ``#/$defs/n`` refers."""
    return shared["$defs"][reference.removeprefix("#/$defs/")]


def with_shared(schema: object, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value's schema with the definitions and options of the whole schema."""
    return {**schema, **shared} if isinstance(schema, Mapping) else {**shared}


def _is_possible(schema: Any, shared: Mapping[str, Any]) -> bool:
    """Return whether some value matches a property's schema; llguidance compiles it to find out.

    ``shared`` are the definitions and options that the schema needs as well.
    """
    return schema is not False and accepts(with_shared(schema, shared))


@dataclass(frozen=True)
class NamedRules:
    """Builder of the Lark rules for named arguments in the order of the schema's properties.

    Example, for an optional ``a`` and a required ``b`` of one type in Python's syntax::

        args: "a=" value_0 args_after_1 | "b=" value_0 ")"
        args_after_1: ", b=" value_0 ")"
        value_0: %json {…}

    Attributes:
        key: function from an argument's name to the Lark expression before its value.
        any_key: Lark expression before a value whose argument may have any name.
        value: function from a value's schema, and the definitions and options that it needs, to
            the Lark expression of the value.
        separator: Lark expression between two arguments; may be empty.
        end: Lark expression after the last argument.
    """

    key: Callable[[str], str]
    any_key: str
    value: Callable[[Any, Mapping[str, Any]], str]
    separator: str
    end: str

    def build(self, rule: str, arguments: NamedArguments, values: dict[str, str]) -> list[str]:
        """Return the rules; the first one has the name ``rule``.

        The rules enforce ``required`` and the schemas of the arguments. If any object fits, the
        arguments may have any names. ``values`` is that of :meth:`ArgumentSyntax.rules`.
        """
        names = [*arguments.values]
        required = arguments.required
        rules = list[str]()
        first = list[str]()

        def value(schema: Any) -> str:
            expression = self.value(schema, arguments.shared)
            if expression not in values:
                values[expression] = f"value_{len(values)}"
                rules.append(f"{values[expression]}: {expression}")
            return values[expression]

        if arguments.others is not None:
            rules.append(f"{rule}_any: {self.any_key} {value(arguments.others)}")
            first.append(f"{rule}_any ({self.separator} {rule}_any)* {self.end}")
        for number, name in enumerate(names):
            after = f"{rule}_after_{number + 1}" if number + 1 < len(names) else self.end
            written = f"{self.key(name)} {value(arguments.values[name])} {after}"
            if all(earlier not in required for earlier in names[:number]):
                first.append(written)
            if number:
                skipped = "" if name in required else f" | {after}"
                rules.append(f"{rule}_after_{number}: {self.separator} {written}{skipped}")
        if not required:
            first.append(self.end)
        return [f"{rule}: {' | '.join(first)}", *rules]


# Types of JSON values in JSON Schema, by Python's types.
_TYPES = {
    bool: "boolean",
    type(None): "null",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
ALL_TYPES = frozenset(_TYPES.values())
_MAX_DEPTH = 16  # maximum depth of references and alternatives that types_of() follows


def json_type(value: object) -> str:
    """Return the type of a JSON value in JSON Schema's words; ``integer`` for a whole number."""
    return _TYPES[type(value)]


def types_of(schema: Any, shared: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types of the values that a translated schema may allow.

    The result is never too small; ``number`` implies ``integer``. ``shared`` has the definitions
    of the schema.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ALL_TYPES
    found = ALL_TYPES
    if "type" in schema:
        names = schema["type"]
        found &= {names} if isinstance(names, str) else {*names}
        found |= {"integer"} if "number" in found else frozenset()
    if "enum" in schema:
        found &= {json_type(value) for value in schema["enum"]}
    if "const" in schema:
        found &= {json_type(schema["const"])}
    if "$ref" in schema:
        found &= types_of(definition(schema["$ref"], shared), shared, depth + 1)
    for part in schema.get("allOf", ()):
        found &= types_of(part, shared, depth + 1)
    if schema.get("anyOf"):
        alternatives = [types_of(part, shared, depth + 1) for part in schema["anyOf"]]
        found &= frozenset[str]().union(*alternatives)
    return found
