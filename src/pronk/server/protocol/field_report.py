"""Report of the fields that a request has and the server ignores, for a header of the response."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

IGNORED_HEADER = "X-Pronk-Ignored"
_MAX_HEADER = 1000  # maximum number of characters of the header's value
# Characters that are not percent-encoded in the header: printable ASCII except the comma, which
# separates paths, and the percent sign.
_HEADER_CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in ",%")
_INDEX = re.compile(r"\[\d+\]")


def summarize(paths: Iterable[str]) -> list[str]:
    """Replace paths that differ only in indices by one path with empty brackets.

    For example ``messages[].id`` stands for ``messages[0].id`` and ``messages[1].id``.
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_INDEX.sub("[]", path), []).append(path)
    return [paths[0] if len(paths) == 1 else general for general, paths in groups.items()]


def report_header(paths: Sequence[str]) -> str:
    """Return the value of the header ``X-Pronk-Ignored``: percent-encoded paths with commas."""
    shown = list[str]()
    length = 0
    for path in paths:
        text = quote(path, safe=_HEADER_CHARACTERS, errors="backslashreplace")
        length += len(text) + len(", ")
        if length > _MAX_HEADER:
            return ", ".join([*shown, f"and {len(paths) - len(shown)} more"])
        shown.append(text)
    return ", ".join(shown)
