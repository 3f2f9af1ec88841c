"""JSON of requests: counting its values before parsing, and parsing that lets other threads run.

The parser of Python's standard library is one call in C, which keeps all other threads from
running, the event loop's included. A body of 4 MiB may have a million values, which take a tenth of
a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

# A JSON string, or the beginning of a list or object. A string without an end reaches to the end of
# the data, and the parser refuses it later. Each alternative begins with a literal, which re finds
# faster than a set of characters.
_VALUES = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|\[|\{', re.DOTALL)


def has_more_values(data: bytes, limit: int) -> bool:
    """Return whether JSON text has more strings, lists and objects than a limit.

    The validation of each of these values takes microseconds. The numbers in a list of token ids
    take nanoseconds each, and are not counted.
    """
    upper_bound = data.count(b'"') // 2 + data.count(b"[") + data.count(b"{")
    if upper_bound <= limit:
        return False
    # A loop, because islice() or len() would search all of the text in one call, in which no other
    # thread runs.
    return any(number == limit for number, _ in enumerate(_VALUES.finditer(data)))


def parse_json(
    text: str,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    objects: list[Any] | None = None,
) -> Any:
    """Return the value of JSON text, as ``json.loads`` does, but let other threads run meanwhile.

    The parser calls a Python function for each object and number, and other threads may run before
    each call. For lists and strings it calls none, so that callers limit their number with
    :func:`has_more_values`.

    Args:
        text: JSON text.
        parse_constant: function that is called with the text ``NaN``, ``Infinity`` or ``-Infinity``
            and returns its value; with ``None``, the value is the float.
        objects: list to which each JSON object is added, inner ones before outer ones.

    Raises:
        ValueError: the text is no JSON.
        RecursionError: lists and objects are nested too deeply.
    """
    found = [] if objects is None else objects

    def read_object(value: dict[str, Any]) -> dict[str, Any]:
        found.append(value)
        return value

    return json.loads(
        text,
        object_hook=read_object,
        parse_int=_read_integer,
        parse_float=_read_float,
        parse_constant=parse_constant,
    )


def _read_integer(text: str) -> int:
    return int(text)


def _read_float(text: str) -> float:
    return float(text)
