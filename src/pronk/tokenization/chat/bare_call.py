"""Recognition of an answer that is one JSON object of a call, without the markers of calls.

Small models of Qwen often write ``{"name": "f", "arguments": {…}}`` as their whole answer. Such an answer is a call if
``f`` is the name of a given tool. Whether anything follows the object is known at the end of the answer only.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from pronk.tokenization.chat.calls import CallPart, JsonEnd, new_call_id

__all__ = ["BareCallReader"]


class BareCallReader:
    """Streaming reader of one answer that holds text back while the whole answer may be a call of ``names``."""

    def __init__(self, names: Collection[str]) -> None:
        # Beginning of the object up to the first brace of the arguments, without white space outside strings.
        self._heads = {f'{{"name":"{name}","arguments":{{': name for name in names}
        self._head = ""  # the part of such a beginning that was read so far
        self._symbols: list[str] = []
        self._arguments: list[str] = []
        self._end = JsonEnd()
        self._num_braces = 0  # number of braces after the arguments; the object ends with one

    @property
    def held(self) -> str:
        """The symbols that are held back."""
        return "".join(self._symbols)

    def push(self, symbols: str) -> bool:
        """Read the next symbols; return whether the whole answer may still be a call."""
        self._symbols.append(symbols)
        at = 0
        while at < len(symbols):
            if self._head not in self._heads:
                character = symbols[at]
                is_quoted = self._head.count('"') % 2 == 1
                self._head += character if is_quoted or not character.isspace() else ""
                if not any(head.startswith(self._head) for head in self._heads):
                    return False
                at += 1
                if self._head in self._heads:
                    self._read_arguments("{", 0)
            elif not self._end.found:
                at = self._read_arguments(symbols, at)
            else:
                self._num_braces += symbols[at] == "}"
                if self._num_braces > 1 or not (symbols[at].isspace() or symbols[at] == "}"):
                    return False
                at += 1
        return True

    def _read_arguments(self, symbols: str, at: int) -> int:
        stop = self._end.read(symbols, at)
        self._arguments.append(symbols[at:stop])
        return stop

    def flush(self) -> list[CallPart]:
        """End the answer; return the parts of its call, none if the answer is no complete call."""
        arguments = "".join(self._arguments)
        if not self._num_braces:
            return []
        try:
            json.loads(arguments)
        except (ValueError, RecursionError):
            return []
        return [CallPart(0, "", new_call_id(), self._heads[self._head]), CallPart(0, arguments)]
