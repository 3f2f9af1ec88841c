"""Server-sent events, parsed from bytes as a network delivers them: cut anywhere.

Source: the WHATWG's HTML standard, section 9.2.6, "Interpreting an event stream". Ids and times to reconnect are read
and forgotten, because an answer of a model cannot be resumed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Event", "EventStream"]

_BREAK = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its data, lines joined by line feeds, and its type if it is not the usual one."""

    data: str
    type: str = "message"


class EventStream:
    """Takes bytes, gives the events that are whole by then; how the bytes are cut changes nothing."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended; without a carriage return, so that none is looked at twice
        self._after_return = False
        self._data: list[str] = []
        self._type = ""
        self._fresh = True

    def feed(self, data: bytes) -> list[Event]:
        """The events that end within ``data``."""
        if self._after_return and data:
            self._after_return = False
            data = data.removeprefix(b"\n")  # the other half of a line's end
        if not data:
            return []
        self._after_return = data.endswith(b"\r")
        *lines, self._rest = _BREAK.split(self._rest + data)
        return [event for line in lines if (event := self._take(line)) is not None]

    def close(self) -> list[Event]:
        """What the end of the stream leaves: an event without the empty line behind it.

        The standard drops it. Some servers end that way after ``[DONE]``, so it counts here.
        """
        lines, self._rest = [self._rest, b""], b""
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: bytes) -> Event | None:
        if self._fresh:
            line, self._fresh = line.removeprefix(_BOM), False
        if not line:
            data, kind = self._data, self._type
            self._data, self._type = [], ""
            return Event("\n".join(data), kind or "message") if data else None
        name, _, value = line.partition(b":")  # a comment has no name
        text = value.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"data":
            self._data.append(text)
        elif name == b"event":
            self._type = text
        return None
