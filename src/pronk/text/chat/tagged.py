"""Arguments of calls between tags, as Qwen3-Coder and GLM-4.5 write them.

Qwen3-Coder, Qwen 3.5 and Nemotron 3 write ``{"city": "Oslo", "days": 2}`` as::

    <parameter=city>
    Oslo
    </parameter>
    <parameter=days>
    2
    </parameter>
    </function>

A value has no quotation marks, so its type follows from the schema of the argument: a value whose
schema allows only strings is the text itself, and a value whose schema allows no string is JSON.
If the schema allows both, a value that is JSON of an allowed type is that JSON, and any other value
is a string. :class:`TaggedArguments` converts arguments to JSON while the model writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pronk.text.chat.arguments import (
    ArgumentReader,
    ArgumentSyntax,
    JsonEnd,
    NamedArguments,
    NamedRules,
    definition,
    json_type,
    types_of,
    with_shared,
)
from pronk.text.chat.symbols import TokenSymbols, plain_text
from pronk.text.stream import prefix_at_end

_NAME = re.compile(r"[^\s<>]{1,128}")  # names of arguments that have a place in a tag
# Lark expression for the name of an argument that may have any name
_ANY_NAME = "/[a-zA-Z_][a-zA-Z_0-9.-]{0,63}/"
# Templates in Jinja write booleans as Python does, so models may do so as well.
_BOOLEANS = {"True": "true", "False": "false"}
_BOOLEAN_TEXTS = '("true" | "false" | "True" | "False")'
_MAX_DEPTH = 16  # maximum depth of references and alternatives that are searched for constraints


@dataclass(frozen=True)
class TaggedSyntax(ArgumentSyntax):
    r"""Arguments between tags.

    The texts of an argument in their order, with the texts of Qwen3-Coder as an example::

        before_key        <parameter=
                          city
        after_key         >\n
                          Oslo
        before_value_end  \n
        value_end         </parameter>
        between           \n

    Attributes:
        before_key: text before the name of an argument.
        after_key: text between the name and the value.
        before_value_end: text between the value and ``value_end``; not a part of the value.
        value_end: tag after a value; no value contains it, except within a JSON object or list.
        between: text after an argument, before the next one or the end.
        end: text after the last argument.
    """

    before_key: str
    after_key: str
    value_end: str
    end: str
    before_value_end: str = ""
    between: str = ""

    def reader(self, schema: Mapping[str, Any], symbols: TokenSymbols) -> ArgumentReader:
        """Return a reader that converts one call's arguments to JSON."""
        return TaggedArguments(self, schema, symbols)

    def rules(
        self, rule: str, schema: str, values: dict[str, str], symbols: TokenSymbols
    ) -> list[str]:
        """Return the Lark rules for the arguments, up to and including ``end``."""
        text = symbols.grammar
        rules = NamedRules(
            key=lambda name: text(f"{self.before_key}{name}{self.after_key}"),
            any_key=f"{text(self.before_key)} {_ANY_NAME} {text(self.after_key)}",
            value=partial(self._value, symbols),
            separator="",
            end=text(self.end),
        )
        return rules.build(rule, NamedArguments.of(json.loads(schema), _NAME.fullmatch), values)

    def shared_rules(self, symbols: TokenSymbols) -> list[str]:
        """Return the rules of ``raw``: any text up to and including ``value_end``."""
        alternatives = list[str]()
        rules = list[str]()
        if self.value_end in symbols.id_only:
            alternatives.append(f"TEXT {symbols.grammar(self.value_end)}")
        if self.value_end not in symbols.of_marker:
            alternatives.append("raw_end")
            rules.append(f"raw_end[lazy]: TEXT {json.dumps(self.value_end)}")
        return [f"raw: {' | '.join(alternatives)}", *rules]

    def not_followed(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the paths of the keywords of a schema that the grammar does not enforce.

        For example, a text without quotation marks cannot be held to a ``pattern``.
        """
        arguments = NamedArguments.of(schema, _NAME.fullmatch)
        paths = [*arguments.not_followed]
        for name, value in arguments.values.items():
            may_be_text = "string" in types_of(value, arguments.shared)
            is_listed = bool(self._choices(value, arguments.shared))
            if may_be_text and not is_listed and not _fits_any(value, arguments.shared):
                paths.append(f"properties.{name}")
        return paths

    def _value(self, symbols: TokenSymbols, schema: Any, shared: Mapping[str, Any]) -> str:
        """Return the Lark expression for a value and the texts after it.

        ``shared`` are the definitions and options that the schema needs as well.
        """
        between = symbols.grammar(self.between)
        end = symbols.grammar(self.before_value_end + self.value_end)
        if "string" not in types_of(schema, shared):
            if schema == {"type": "boolean"}:
                return f"{_BOOLEAN_TEXTS} {end} {between}"
            value = json.dumps(with_shared(schema, shared), ensure_ascii=False)
            return f"%json {value} {end} {between}"
        choices = self._choices(schema, shared)
        if choices:
            texts = [json.dumps(text, ensure_ascii=False) for text in choices]
            return f"({' | '.join(texts)}) {end} {between}"
        return f"raw {between}"

    def _choices(self, schema: Any, shared: Mapping[str, Any]) -> list[str]:
        """Return the texts of the values that a schema lists; none if it does not list them.

        None either if one of them contains the tag after a value.
        """
        while isinstance(schema, Mapping) and {*schema} == {"$ref"}:
            schema = definition(schema["$ref"], shared)
        if not isinstance(schema, Mapping):
            return []
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        texts = [
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for value in values
        ]
        is_clean = all(text and self.value_end not in text for text in texts)
        return texts if is_clean else []


def _fits_any(schema: Any, shared: Mapping[str, Any], depth: int = 0) -> bool:
    """Return whether a schema, apart from its types, allows every value."""
    if not isinstance(schema, Mapping):
        return True
    if depth > _MAX_DEPTH or not {*schema} <= {"type", "anyOf", "$ref"}:
        return False
    parts = [*schema.get("anyOf", ())]
    if "$ref" in schema:
        parts.append(definition(schema["$ref"], shared))
    return all(_fits_any(part, shared, depth + 1) for part in parts)


class TaggedArguments:
    """Incremental conversion of a call's arguments between tags to JSON.

    Arguments that can only be strings are emitted as the model writes them; others once they are
    complete. Text at places where only tags may stand is dropped.

    Args:
        syntax: the tags.
        schema: schema of the arguments, translated by :mod:`pronk.text.json_schema`.
        symbols: symbols of the model's tokens.
    """

    def __init__(
        self, syntax: TaggedSyntax, schema: Mapping[str, Any], symbols: TokenSymbols
    ) -> None:
        self.found = False  # whether the end of the arguments was read
        text = symbols.of_text
        self._before_key = text(syntax.before_key)
        self._after_key = text(syntax.after_key)
        self._before_value_end = text(syntax.before_value_end)
        self._value_end = text(syntax.value_end)
        self._end = text(syntax.end)
        self._arguments = NamedArguments.of(schema, _NAME.fullmatch)
        self._state: Literal["between", "key", "bracket", "value"] = "between"
        self._held = ""  # text that was read and whose meaning later text decides
        self._num_arguments = 0
        self._value: list[str] = []  # pieces of the value being read, unless it is a string
        self._json_end: JsonEnd | None = None  # end of an object or list that is being read
        # Types that the argument being read may have.
        self._types: frozenset[str] = frozenset()

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read ``text`` from the offset ``at`` up to the end of the arguments or of the text.

        Returns:
            The offset after the characters read, and the JSON of the arguments that is now certain.
        """
        num_held = len(self._held)
        self._held += text[at:]
        size = len(self._held)
        written = list[str]()
        while not self.found and self._step(written):
            pass
        if not self.found:
            return len(text), "".join(written)
        rest = len(self._held)
        self._held = ""
        return at + size - num_held - rest, "".join(written)

    def _step(self, written: list[str]) -> bool:
        """Read the next tag; append JSON to ``written``. Return False if more text is needed."""
        if self._state == "between":
            return self._read_between(written)
        if self._state == "key":
            name, tag, rest = self._held.partition(self._after_key)
            if not tag:
                return False
            self._held = rest
            self._begin_value(plain_text(name), written)
            return True
        if self._state == "bracket":
            return self._read_bracket()
        return self._read_value(written)

    def _read_between(self, written: list[str]) -> bool:
        places = {tag: self._held.find(tag) for tag in (self._before_key, self._end)}
        found = {tag: at for tag, at in places.items() if at >= 0}
        if not found:
            beginnings = [prefix_at_end(self._held, tag) for tag in places]
            self._held = max(beginnings, key=len)
            return False
        tag = min(found, key=lambda each: found[each])
        self._held = self._held[found[tag] + len(tag) :]
        if tag == self._end:
            self.found = True
            written.append("}" if self._num_arguments else "{}")
        else:
            self._state = "key"
        return True

    def _begin_value(self, name: str, written: list[str]) -> None:
        before = ", " if self._num_arguments else "{"
        written.append(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_arguments += 1
        schema = self._arguments.value_schema(name)
        self._types = types_of(schema, self._arguments.shared)
        if self._is_string:
            written.append('"')
        self._state = "value" if "string" in self._types else "bracket"
        self._json_end = None

    def _read_bracket(self) -> bool:
        """Read a JSON object or list up to its last bracket, as its strings may contain tags."""
        if self._json_end is None:
            if not self._held.strip():
                return False
            self._json_end = JsonEnd()
            if self._held.lstrip()[0] not in "{[":
                self._state = "value"
                return True
        stop, value = self._json_end.read(self._held, 0)
        self._value.append(plain_text(value))
        self._held = self._held[stop:]
        if self._json_end.found:
            self._state = "value"
        return self._json_end.found

    @property
    def _is_string(self) -> bool:
        """Whether the argument being read can only be a string."""
        return self._types == {"string"}

    def _read_value(self, written: list[str]) -> bool:
        value, tag, rest = self._held.partition(self._value_end)
        if tag:
            self._held = rest
            self._take(value.removesuffix(self._before_value_end), written)
            written.append('"' if self._is_string else self._json("".join(self._value)))
            self._value = []
            self._state = "between"
            return True
        tags = (self._value_end, self._before_value_end + self._value_end)
        self._held = max((prefix_at_end(value, each) for each in tags), key=len)
        self._take(value.removesuffix(self._held), written)
        return False

    def _take(self, value: str, written: list[str]) -> None:
        """Read a part of a value: emit a part of a string, and collect a part of another value."""
        value = plain_text(value)
        if self._is_string:
            written.append(json.dumps(value, ensure_ascii=False)[1:-1])
        else:
            self._value.append(value)

    def _json(self, text: str) -> str:
        """Return the JSON of a value that may be other than a string."""
        value: Any = text
        with suppress(ValueError, RecursionError):
            value = json.loads(_BOOLEANS.get(text.strip(), text), parse_constant=int)
        is_allowed = json_type(value) in self._types and not isinstance(value, str)
        if not is_allowed and "string" in self._types:
            value = text
        return json.dumps(value, ensure_ascii=False)
