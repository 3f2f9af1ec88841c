"""Guides: required forms of the generated text.

A guide is a JSON schema, a regular expression, a list of allowed texts, or a grammar.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pronk.base.checks import check_flag
from pronk.base.errors import GuideError, describe_error, describe_json_error
from pronk.base.keywords import known_keywords

GuideKind = Literal["json", "regex", "choice", "grammar"]

# Values of ``SamplingParams.guide_mode``, which says what each of them does.
GuideMode = Literal["forced", "plain", "jump"]

# Options of llguidance for JSON schemas. White space is that of ``json.dumps``, or may be wherever
# JSON allows it. Unsupported keywords of a schema are errors (not lenient).
JSON_DUMPS_STYLE: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
WHITESPACE_STYLE: Mapping[str, Any] = {"whitespace_flexible": True, "lenient": False}

# Maximum number of characters of a schema, expression or grammar, and of all texts of a choice
# together.
MAX_SIZE = 2**18
MAX_CHOICES = 1024
# Maximum number of nested levels of a JSON schema.
_MAX_DEPTH = 64


@known_keywords
@dataclass(frozen=True)
class Guide:
    """Required form of the generated text: one of ``json``, ``regex``, ``choice`` and ``grammar``.

    Equal guides are compiled once per model. :mod:`pronk.sampling.grammars` lists the supported
    JSON schemas and grammars.

    Attributes:
        json: JSON schema as a mapping or as text; the constructor converts a mapping to text.
            ``True`` allows any JSON value, and ``{"type": "object"}`` any object.
        regex: regular expression that the whole text matches, in Rust's syntax, without
            look-around.
        choice: allowed texts; 1..1024, distinct, not empty.
        grammar: grammar in llguidance's dialect of Lark; the text matches its rule ``start``.
        whitespace: whether JSON may have white space wherever the standard allows it. Otherwise
            JSON is written on one line, as by Python's ``json.dumps``, which leaves fewer tokens to
            the model.

    Raises:
        GuideError: the number of given forms is not 1, or a value is invalid.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace: bool = False

    def __post_init__(self) -> None:
        given = [kind for kind in get_args(GuideKind) if getattr(self, kind) is not None]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            msg = f"guide: expected one of json, regex, choice and grammar, found {names}"
            raise GuideError(msg)
        check_flag("guide: whitespace", self.whitespace)
        if self.whitespace and self.json is None:
            msg = (
                f"guide: whitespace: expected it with json only, found it with {given[0]}; "
                "remove it"
            )
            raise GuideError(msg)
        if self.json is not None:
            object.__setattr__(self, "json", _checked_schema(self.json))
        elif self.choice is not None:
            object.__setattr__(self, "choice", check_texts("guide: choice", self.choice))
        else:
            text = getattr(self, given[0])
            if not isinstance(text, str) or not text:
                msg = f"guide: {given[0]}: expected a text that is not empty, found {text!r:.60}"
                raise GuideError(msg)
        try:
            self.source.encode()
        except UnicodeEncodeError as error:
            half = self.source[error.start]
            msg = (
                f"guide: {given[0]}: expected valid Unicode, found half a character (lone "
                f"surrogate): {half!r}"
            )
            raise GuideError(msg) from error
        size = len(self.source) if self.choice is None else sum(map(len, self.choice))
        if size > MAX_SIZE:
            msg = (
                f"guide: {given[0]}: expected at most {MAX_SIZE} characters, found {size}; "
                "make it smaller"
            )
            raise GuideError(msg)

    @property
    def kind(self) -> GuideKind:
        """Name of the field that is set: ``json``, ``regex``, ``choice`` or ``grammar``."""
        return next(kind for kind in get_args(GuideKind) if getattr(self, kind) is not None)

    @property
    def source(self) -> str:
        """Text of the schema, expression or grammar; for ``choice``, the texts as a JSON list."""
        if self.choice is not None:
            return jsonlib.dumps(list(self.choice), ensure_ascii=False)
        return str(self.json or self.regex or self.grammar)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the constructor as JSON values, by name."""
        value = self.source if self.choice is None else list(self.choice)
        values: dict[str, Any] = {self.kind: value}
        if self.whitespace:
            values["whitespace"] = True
        return values


def _checked_schema(schema: object) -> str:
    """Return a schema as JSON text; raise a ``GuideError`` for a value that is no schema.

    Properties keep their order, which is the order of generation.
    """
    if isinstance(schema, str) and len(schema) > MAX_SIZE:
        return schema  # the caller raises the error for its size
    try:
        parsed = jsonlib.loads(schema) if isinstance(schema, str) else schema
        too_deep = _depth(parsed) > _MAX_DEPTH
    except RecursionError:
        too_deep = True
    except ValueError as error:
        is_json_error = isinstance(error, jsonlib.JSONDecodeError)
        found = describe_json_error(error) if is_json_error else describe_error(error)
        msg = f"guide: json: expected a schema, found {found}; correct the JSON text"
        raise GuideError(msg) from error
    if too_deep:
        msg = f"guide: json: expected a schema of at most {_MAX_DEPTH} levels, found more; use $ref"
        raise GuideError(msg)
    if not isinstance(parsed, (Mapping, bool)):
        msg = f"guide: json: expected a schema, an object or true, found {parsed!r:.60}"
        raise GuideError(msg)
    if parsed is False:
        msg = "guide: json: expected a schema that some value matches, found false"
        raise GuideError(msg)
    return schema if isinstance(schema, str) else schema_text(parsed)


def schema_text(schema: Mapping[str, Any] | bool) -> str:
    """Return a schema as JSON text; raise a ``GuideError`` if it has values that JSON lacks."""
    try:
        text = jsonlib.dumps(_to_json_values(schema), ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        msg = (
            "guide: json: expected valid Unicode, found half a character (lone surrogate): "
            f"{half!r}"
        )
        raise GuideError(msg) from error
    except (TypeError, ValueError) as error:
        msg = f"guide: json: expected a schema of JSON values, found other values ({error})"
        raise GuideError(msg) from error
    except RecursionError as error:
        msg = "guide: json: expected a schema of fewer levels, found too many; use $ref"
        raise GuideError(msg) from error
    return text


def _to_json_values(value: Any) -> Any:
    """Return a value with dictionaries for mappings and lists for tuples, which ``json`` needs."""
    if isinstance(value, Mapping):
        return {key: _to_json_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_values(inner) for inner in value]
    return value


def _depth(value: object) -> int:
    """Return the number of nested levels of a JSON value: 1 for a number, 2 for ``[1]``."""
    elements = [*value.values()] if isinstance(value, Mapping) else value
    if not isinstance(elements, (list, tuple)):
        return 1
    return 1 + max(map(_depth, elements), default=0)


def check_texts(name: str, texts: object) -> tuple[str, ...]:
    """Return the texts of a choice; raise a ``GuideError`` unless they are 1..1024 distinct texts.

    ``name`` is the name of the option in error messages.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        msg = f"{name}: expected a list of texts, found {texts!r:.60}"
        raise GuideError(msg)
    if not 1 <= len(texts) <= MAX_CHOICES:
        msg = f"{name}: expected 1..{MAX_CHOICES} texts, found {len(texts)}"
        raise GuideError(msg)
    for text in texts:
        if not isinstance(text, str) or not text:
            msg = f"{name}: expected texts that are not empty, found {text!r:.60}"
            raise GuideError(msg)
    if len(set(texts)) < len(texts):
        msg = f"{name}: expected distinct texts, found a duplicate; remove it"
        raise GuideError(msg)
    return tuple(texts)
