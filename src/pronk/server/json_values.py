"""JSON of requests: counting its values before it is parsed, and parsing that lets other threads run.

The parser of Python's standard library is one call in C, which keeps all other threads from
running, the event loop's included. A body of 4 MiB may have a million values, which take a tenth of
a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

# A text, or the beginning of a list or object. A text without an end ends with the data; the parser
# refuses it. Each alternative begins with a literal, which re searches for faster than for a set.
_VALUES = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|\[|\{', re.DOTALL)


def has_more_values(data: bytes, limit: int) -> bool:
    """Return whether JSON text has more texts, lists and objects than a limit.

    Each of these costs microseconds after the parser; the numbers in a list of token ids cost
    nanoseconds.
    """
    if data.count(b'"') // 2 + data.count(b"[") + data.count(b"{") <= limit:
        return False  # even if all of these characters were outside of texts
    # A loop, because islice() or len() would search all of the text in one call.
    return any(number == limit for number, _ in enumerate(_VALUES.finditer(data)))


def parse_json(text: str, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of JSON text.

    Raise ``ValueError`` or ``RecursionError`` as ``json.loads`` does.

    The parser calls a function of Python for each object and number, before which other threads may
    run. Lists and texts have no such function; their number is to be limited by
    :func:`has_more_values`.

    Args:
        text: JSON text.
        parse_constant: returns the value of ``NaN``, ``Infinity`` and ``-Infinity``; ``None``: the
            float.
    """
    return json.loads(
        text,
        object_hook=_read_object,
        parse_int=_read_integer,
        parse_float=_read_float,
        parse_constant=parse_constant,
    )


def _read_object(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _read_integer(text: str) -> int:
    return int(text)


def _read_float(text: str) -> float:
    return float(text)
