"""Conversion of JSON schemas of any draft to schemas that llguidance follows exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pronk.base.errors import GuideError, refuse
from pronk.text.guide import JSON_DUMPS_STYLE, WHITESPACE_STYLE
from pronk.text.json_schema.findings import Fault
from pronk.text.json_schema.finite import is_finite
from pronk.text.json_schema.references import Path, References, SchemaPart
from pronk.text.json_schema.translation import (
    TranslatedSchema,
    parts,
    referenced,
    translate,
)
from pronk.text.json_schema.trial import MAX_UNTRIED_CHARS, accepts

# number of cached schemas; the schema of a tool usually has a few thousand characters
_CACHE_SIZE = 256
_MAX_CACHED_SIZE = 2**16  # maximum characters of a schema whose translation is cached
# maximum number of attempts to leave out the part of a schema that llguidance refuses
_MAX_MENDS = 16
# number of characters up to which llguidance accepts every schema without risky keywords
_MAX_SAFE_SIZE = 2**14
# escapes of one letter in JSON strings; those such as ``\u0003`` are not among them
_ESCAPES = 'nrbtf\\"'
_MAX_SHOWN = 200  # maximum characters of a path in an error message
# Keywords in the order in which they are left out of a schema that llguidance refuses, the least
# important one first.
_LEAST_IMPORTANT = (
    "minProperties", "maxProperties", "pattern", "format", "multipleOf", "minLength", "maxLength",
    "minItems", "maxItems", "exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum",
    "patternProperties", "not", "allOf", "oneOf", "anyOf", "$ref", "required",
    "additionalProperties", "items", "prefixItems", "enum", "const", "properties",
)  # fmt: skip


@dataclass(frozen=True)
class Relaxed:
    """Schema that llguidance follows exactly, and what was left out of the original schema.

    Every value of the original schema fits ``schema``. Every text that the grammar of ``schema``
    allows fits the original schema without the keywords in ``dropped``.

    Attributes:
        schema: the schema, with llguidance's options in the key ``x-guidance``.
        dropped: paths of the keywords and schemas that were left out, such as
            ``properties.m.uniqueItems``.
        multiple: least common multiple of the digits of all ``multipleOf`` values (25 for 0.25), of
            this schema and of the earlier ones in the same grammar. The next schema of the grammar
            needs it, because llguidance limits the multiple of a whole grammar.
    """

    schema: Mapping[str, Any]
    dropped: Sequence[str]
    multiple: int = 1


def relax(schema: Mapping[str, Any] | bool, multiple: int = 1) -> Relaxed:
    """Return a schema without the keywords that a grammar cannot enforce.

    Args:
        schema: schema of JSON values, of any draft; may be invalid.
        multiple: :attr:`Relaxed.multiple` of the previous schema in the same grammar; 1 if there
            is none.
    """
    found, faults = _translated(json.dumps(schema), multiple)
    relaxed = _with_options(found)
    return Relaxed(relaxed, tuple(_text(fault.path) for fault in faults), found.multiple)


def check(schema: Mapping[str, Any] | bool, *, whitespace: bool = False) -> Mapping[str, Any]:
    """Return an equivalent schema that llguidance follows exactly.

    Args:
        schema: schema of JSON values, of any draft.
        whitespace: whether texts may have white space wherever the standard allows it.

    Raises:
        GuideError: a keyword is invalid, or a grammar cannot enforce it. The message names the
            keyword and its path.
    """
    found, faults = _translated(json.dumps(schema), 1)
    for fault in faults:
        if not fault.is_annotation:
            refuse("guide: json", _message(fault), GuideError)
    return _with_options(found, WHITESPACE_STYLE if whitespace else JSON_DUMPS_STYLE)


def _translated(text: str, multiple: int) -> tuple[TranslatedSchema, Sequence[Fault]]:
    """Return the translation of a schema, and the keywords and schemas that were left out of it.

    The arguments and the result are those of :func:`_cached`. The result of a long schema is not
    cached.
    """
    if len(text) <= _MAX_CACHED_SIZE:
        return _cached(text, multiple)
    return _cached.__wrapped__(text, multiple)


@lru_cache(_CACHE_SIZE)
def _cached(text: str, multiple: int) -> tuple[TranslatedSchema, Sequence[Fault]]:
    """Return a translation that llguidance accepts, and the keywords and schemas left out of it.

    ``text`` is the schema as JSON text; ``multiple`` is that of the earlier schemas in the grammar.
    """
    schema = json.loads(text)
    references = References(schema)
    left_out = set[Path]()
    for _ in range(_MAX_MENDS):
        found = translate(references.root, references, left_out, multiple)
        if () in left_out or _can_be_followed(found):
            return found, found.faults
        if _size(found) <= MAX_UNTRIED_CHARS:
            left_out |= _failing_part(references, left_out)
        else:
            left_out |= _failing_properties(references, left_out) or {()}
    found = translate(references.root, references, {()}, multiple)
    return found, found.faults


def _failing_part(references: References, left_out: set[Path]) -> set[Path]:
    """Return the paths that must be left out so that llguidance accepts a schema.

    The paths are of keywords in the innermost schema that llguidance refuses, or else of that whole
    schema. ``left_out`` are paths that are left out already.
    """
    target = references.root
    inner: SchemaPart | None = references.root
    candidates = [*referenced(target, references, left_out), *parts(target)]
    while inner is not None:
        target = inner
        refused = (each for each in candidates if not _is_accepted(each, references, left_out))
        inner = next(refused, None)
        candidates = [] if inner is None else [*parts(inner)]
    keywords = target.schema if isinstance(target.schema, Mapping) else {}
    paths = [(*target.path, keyword) for keyword in _LEAST_IMPORTANT if keyword in keywords]
    found = set[Path]()
    for path in paths:
        found.add(path)
        if _is_accepted(target, references, left_out | found):
            break
    else:
        return {target.path}
    for path in paths:  # put back each keyword that is accepted if the other ones stay out
        if _is_accepted(target, references, left_out | (found - {path})):
            found.discard(path)
    return found


def _failing_properties(references: References, left_out: set[Path]) -> set[Path]:
    """Return the paths of the properties of the whole schema that llguidance refuses.

    If it refuses none that was tried, return the paths of the properties that are too long to try:
    the trial of more than ``MAX_UNTRIED_CHARS`` characters needs a child process and may take
    seconds.
    """
    failing = set[Path]()
    long = set[Path]()
    for part in parts(references.root):
        if part.path[0] != "properties" or part.path in left_out:
            continue
        found = translate(part, references, left_out)
        if _size(found) > MAX_UNTRIED_CHARS:
            long.add(part.path)
        elif not _can_be_followed(found):
            failing.add(part.path)
    return failing or long


def _is_accepted(target: SchemaPart, references: References, left_out: set[Path]) -> bool:
    return _can_be_followed(translate(target, references, left_out))


def _can_be_followed(found: TranslatedSchema) -> bool:
    """Return whether llguidance accepts a translated schema; compile it on trial if it is risky."""
    if not found.is_risky and _size(found) <= _MAX_SAFE_SIZE:
        return True
    return is_finite(found.schema) and accepts(_with_options(found))


def _size(found: TranslatedSchema) -> int:
    return len(json.dumps(found.schema))


def _with_options(
    found: TranslatedSchema, style: Mapping[str, Any] = JSON_DUMPS_STYLE
) -> Mapping[str, Any]:
    """Return a translated schema with llguidance's options under the key ``x-guidance``."""
    options = {**style}
    if not found.has_control_escapes:
        options["json_allowed_escapes"] = _ESCAPES
    schema = found.schema
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {**schema, "x-guidance": options}


def _text(path: Path) -> str:
    return ".".join(path)


def _message(fault: Fault) -> str:
    """Return the error message for a keyword: ``properties.m: expected …, found …; change it``."""
    if fault.found:
        where = _text(fault.path)
        found = fault.found
        advice = "change it"
    else:
        where = _text(fault.path[:-1])
        found = repr(fault.path[-1])
        advice = "remove it"
    place = f"{where[:_MAX_SHOWN]}: " if where else ""
    return f"{place}expected {fault.expected}, found {found}; {advice}"
