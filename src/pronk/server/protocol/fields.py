"""Reading of an object of a request: known fields, and the treatment of all others.

A field that pronk lacks is treated as :mod:`pronk.server.protocol.field_table` says. An option that
is not in the table for its route is treated by the first rule that applies:

1. An option whose name is almost that of a field of pronk is refused as a typing error.
2. An option in the table for another route is treated as on that route.
3. An option whose name has a word such as ``stop`` or ``schema`` is refused.
4. An option with a number that is not neutral is refused, because every sampler has one.
5. Any other option is accepted: in practice such options choose a machine, a record or a view.

Unknown fields of messages, items and tools only describe what the client has, and are accepted. Two
fields that mean the same may have the same value; different values are refused.

The names of accepted and renamed fields are reported (``RequestBody.ignored``), and the server
sends the report in a header (:mod:`pronk.server.protocol.field_report`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, LiteralString

from pydantic_core import PydanticCustomError

from pronk.server.protocol.field_table import (
    OPTION_PARTS,
    Accepted,
    Envelope,
    Refused,
    Renamed,
    Treatment,
)

# Values that are the same as no field, for those of pronk's own fields that have a default.
EMPTY: tuple[Any, ...] = ("", [], {})
# Values that are the same as no field, for fields that pronk lacks: they switch a sampler or an
# option off, or are empty.
_SWITCHED_OFF: tuple[Any, ...] = (False, "", [], {}, 0, -1)
# Limits on hostile bodies: a comparison of names takes 0.1 ms, and a report with many names is of
# no use.
_MAX_OPTIONS = 128  # maximum number of options of one request
_MAX_MISSPELT = 64  # maximum number of characters of a name that is compared with known names
_MAX_REPORTED = 32  # maximum number of names in the report about one object
# Words in names of options that only describe a request, its sender or its time. Clients invent
# options for their own records, so that the names differ from client to client, and some values are
# numbers.
_FOR_RECORDS = re.compile(
    r"cache|session|trace|tracing|telemetry|metadata|request_id|client_|^user_|^x[-_]|^_"
    r"|(^|_)(timestamp|time|deadline|date|created|updated|attempts?|retry|retries|version|revision"
    r"|turn|index)(_|$)"
)
# Words in names of options that change the answer, even if the value is a text or an object. The
# answer would be wrong without the option.
_CHANGES_ANSWER = re.compile(
    # words about where the text ends
    r"stop|ban|bad_words|until|terminator|^eos|^bos|max_words|limit|token"
    # words about what the model reads
    r"|prompt|instruction|system|tool|function|prefix|suffix|history|prefill|image|context|knowledge"
    # words about the form of the answer
    r"|schema|json|format|grammar|choices|enum|pattern|constraint|output_type|do_not|exclude"
    # words about how tokens are drawn
    r"|sampl|generation|param|penalt|greedy|beam|mirostat|^adapter|steering|vector"
    # words about what the reply reports
    r"|logprob"
)
# Values of pronk's own fields that clients of other servers send for "not set", such as seed -1.
# They are the same as no field.
NEUTRAL_VALUES: Mapping[str, Collection[Any]] = {
    "seed": (-1,),
    "logprobs": (False,),
}

Path = tuple[str, ...]  # names of the nested fields that lead from an object to a field in it


@dataclass(frozen=True)
class ObjectFields:
    """Fields that an object of a request may have.

    Attributes:
        known: names of the fields that pronk implements.
        optional: names of the fields in ``known`` that may be missing.
        meaningful: empty values that are not the same as no field, by the name of the field.
        rows: treatments of other fields, by name.
        is_record: whether the object only describes something, so that unknown fields are ignored.
    """

    known: Collection[str] = frozenset()
    optional: Collection[str] = frozenset()
    meaningful: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, Treatment] = field(default_factory=dict)
    is_record: bool = False

    def is_neutral(self, name: str, value: Any) -> bool:
        """Return whether a value of a known field is the same as no field."""
        if value is None or _is_among(value, NEUTRAL_VALUES.get(name, ())):
            return True
        means_something = name in self.meaningful and value == self.meaningful[name]
        return name in self.optional and _is_among(value, EMPTY) and not means_something

    def treatment(self, name: str, value: Any) -> Treatment | None:
        """Return the treatment of a field that pronk does not implement.

        Returns ``None`` for an unknown option that may change the answer.
        """
        row = self._row(name, self.rows)
        if row is not None or self.is_record:
            return row or Accepted()
        is_misspelt = len(name) <= _MAX_MISSPELT and _near(name, self.known) is not None
        return None if is_misspelt else self._foreign_treatment(name, value)

    def _foreign_treatment(self, name: str, value: Any) -> Treatment | None:
        """Return the treatment of an option that is not in the table for its own route."""
        for rows in OPTION_PARTS:
            if (row := self._row(name, rows)) is not None:
                return row
        if _FOR_RECORDS.search(name):
            return Accepted()
        if _is_among(value, _SWITCHED_OFF):
            return Refused()
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number or _CHANGES_ANSWER.search(name) else Accepted()

    def _row(self, name: str, rows: Mapping[str, Treatment]) -> Treatment | None:
        """Return the treatment of a field in ``rows``, a part of the table, or ``None``.

        A new name may itself be renamed: if ``n_predict`` is ``max_tokens``, and ``max_tokens`` is
        ``max_output_tokens``, then ``n_predict`` is ``max_output_tokens``. If the last name is no
        field of the object, the result is ``None``.
        """
        row = rows.get(name)
        while isinstance(row, Renamed) and row.name not in self.known:
            row = self.rows.get(row.name)
        return row


@dataclass
class Fields:
    """The fields of an object of a request, sorted by the rules of this module.

    Attributes:
        known: values of the fields that pronk implements, by name.
        ignored: names of ignored and renamed fields, for the report.
        written: path of each field in ``known`` that the client wrote under another name.
    """

    known: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    written: dict[str, Path] = field(default_factory=dict)


def read_fields(given: Mapping[str, Any], about: ObjectFields, path: Path = ()) -> Fields:
    """Apply the rules of this module to the fields of an object.

    Args:
        given: the object.
        about: the fields that the object may have.
        path: names of the fields that lead to ``given``, if ``given`` is an object whose fields
            count as fields of the request (``Envelope``); empty for the request itself.

    Raises:
        PydanticCustomError: a field changes the answer, contradicts another one, or is an unknown
            option.
    """
    # Each option costs a search for a similar name.
    if not about.is_record and len(given) > _MAX_OPTIONS:
        message = f"expected at most {_MAX_OPTIONS} fields, found {len(given)}; leave some out"
        raise PydanticCustomError("too_many_fields", "{message}", {"message": message})
    reader = _FieldReader(given, about, path)
    for name, value in given.items():
        if name not in about.known:
            reader.treat(name, value)
        elif not about.is_neutral(name, value):
            reader.fields.known[name] = value
    ignored = reader.fields.ignored
    if (num_left := len(ignored) - _MAX_REPORTED) > 0:
        ignored[_MAX_REPORTED:] = [f"and {num_left} more"]
    return reader.fields


@dataclass
class _FieldReader:
    """Reader of the fields of an object that pronk does not implement."""

    given: Mapping[str, Any]
    about: ObjectFields
    path: Path
    fields: Fields = field(default_factory=Fields)

    def treat(self, name: str, value: Any) -> None:
        """Treat a field as the table says: store it in ``fields``, ignore it or refuse it."""
        if value is None:
            return
        match self.about.treatment(name, value):
            case Renamed(target):
                self._rename(name, value, target)
            case Accepted():
                self.fields.ignored.append(name)
            case Refused() as row:
                _refuse_unless_neutral((*self.path, name), value, row)
            case Envelope() if isinstance(value, Mapping):
                self._open(name, value)
            case _:
                raise _unknown((*self.path, name), self.about.known)

    def _rename(self, name: str, value: Any, target: str) -> None:
        """Read a value as the field ``target``, unless the object already has that field."""
        other = self._value(target)
        if other is None:
            if not self.about.is_neutral(target, value):
                self.fields.known[target] = value
                self.fields.written[target] = (*self.path, name)
            self.fields.ignored.append(f"{name} (as {target})")
        # The value -1 means "no limit", and contradicts no other value.
        elif self.about.is_record or value == -1 or _is_same(value, other):
            self.fields.ignored.append(name)
        else:
            raise self._contradiction((*self.path, name), target, value)

    def _open(self, name: str, value: Mapping[str, Any]) -> None:
        """Read the fields of ``value``, an envelope, as fields of the object that contains it.

        Envelopes within ``value`` are ignored.
        """
        nested = [key for key in value if isinstance(self.about.rows.get(key), Envelope)]
        options = {key: each for key, each in value.items() if key not in nested}
        inner = read_fields(options, self.about, (*self.path, name))
        self.fields.ignored += [f"{name}.{each}" for each in [*inner.ignored, *nested]]
        for target, each in inner.known.items():
            other = self._value(target)
            written = inner.written.get(target, (*self.path, name, target))
            if other is None:
                self.fields.known[target] = each
                self.fields.written[target] = written
            elif not _is_same(each, other):
                raise self._contradiction(written, target, each)

    def _value(self, name: str) -> Any:
        """Return the value that the object has for a known field, under any of the field's names.

        Returns ``None`` if the object does not have the field.
        """
        own = self.given.get(name)
        return self.fields.known.get(name) if self.about.is_neutral(name, own) else own

    def _contradiction(self, path: Path, target: str, value: Any) -> PydanticCustomError:
        """Return the error for two fields with one meaning and different values.

        The field at ``path`` is another name for ``target``; ``value`` is its value.
        """
        other = self.fields.written.get(target, (target,))
        if not self.about.is_neutral(target, self.given.get(target)):
            other = (*self.path, target)
        expected = f"expected the value of {'.'.join(other)}, which means the same"
        return _unsupported(path, expected, value, "leave one out")


def _near(name: str, known: Collection[str]) -> str | None:
    close = get_close_matches(name, known, 1, cutoff=0.8)
    return close[0] if close else None


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values mean the same; a list with one text means the text."""
    return bool(other in (value, [value]) or value == [other])


def _refuse_unless_neutral(path: Path, value: Any, row: Refused) -> None:
    neutral = row.neutral
    if not row.neutral:
        neutral = _SWITCHED_OFF
    # If True is neutral, the switch is on by default, and False changes the answer.
    elif not _is_among(True, row.neutral):
        # 0 and -1 are left out: row.neutral has the number that switches the sampler off, and 0 may
        # switch it on.
        neutral = (*row.neutral, *EMPTY, False)
    if _is_among(value, neutral):
        return
    shown = " or ".join(json.dumps(each) for each in row.neutral)
    raise _unsupported(path, f"expected {shown or 'no such field'}", value, row.advice)


def _is_among(value: Any, values: Collection[Any]) -> bool:
    """Return whether a JSON value is among others; ``False`` and 0 differ, as do ``True`` and 1."""
    is_bool = isinstance(value, bool)
    return any(is_bool == isinstance(each, bool) and value == each for each in values)


def _unsupported(path: Path, expected: str, value: Any, advice: str) -> PydanticCustomError:
    if isinstance(value, Mapping):
        found = "an object"
    elif isinstance(value, list):
        found = "a list"
    else:
        found = f"{json.dumps(value):.40}"
    message = f"{expected}, found {found}; other values are not supported, {advice}"
    return _field_error("unsupported", message, path)


def _unknown(path: Path, known: Collection[str]) -> PydanticCustomError:
    near = _near(path[-1], known)
    advice = f"use {near}" if near else "remove it"
    message = f"expected only known fields, found an unknown one; {advice}"
    return _field_error("unknown_field", message, path)


def _field_error(kind: LiteralString, message: str, path: Path) -> PydanticCustomError:
    """Return the error that pydantic reports for the field at a path in the request's object.

    ``kind`` is the error's type, from which ``validation_to_api_error`` takes the error's code.
    """
    context = {"message": message, "field": [_encodable(name) for name in path]}
    return PydanticCustomError(kind, "{message}", context)


def _encodable(name: str) -> str:
    """Return a name with halves of surrogate pairs escaped, because UTF-8 cannot encode them."""
    return name.encode("utf-8", "backslashreplace").decode()
