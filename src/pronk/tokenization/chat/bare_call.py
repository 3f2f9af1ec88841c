"""Answers that are one JSON object of a call, without the markers of calls.

Small models of Qwen often write ``{"name": "f", "arguments": {…}}`` as their whole answer, alone or as a block of code
between three backticks. Such an answer is a call if ``f`` is the name of a given tool. Whether anything follows the
object is known at the end of the answer only.

The constants of this module also define such answers for the grammar, which guides their arguments.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from pronk.tokenization.chat.calls import CallPart, JsonEnd, new_call_id
from pronk.tokenization.chat.dialects import plain_text

# Parts of a call, without the white space that may be around each part and between its characters outside strings.
OPENINGS = {"": "", "```": "```", "```json": "```"}  # text before the object: text after it
BEFORE_NAME, AFTER_NAME = '{"name":', ',"arguments":'
SPACE = " \t\r\n"  # characters of white space in JSON


class BareCallReader:
    """Streaming reader that holds an answer back while the whole of it may be a call of ``names``."""

    def __init__(self, names: Collection[str]) -> None:
        # Keys: text up to the first brace of the arguments. Values: name of the tool, text after the arguments.
        self._heads = {
            f'{opening}{BEFORE_NAME}"{name}"{AFTER_NAME}{{': (name, f"}}{closing}")
            for name in names
            for opening, closing in OPENINGS.items()
        }
        self._head = ""  # the part of such a beginning that was read so far
        self._symbols: list[str] = []
        self._arguments: list[str] = []
        self._end = JsonEnd()
        self._tail = ""  # the part of the text after the arguments that was read so far

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
                self._head += character if is_quoted or character not in SPACE else ""
                if not any(head.startswith(self._head) for head in self._heads):
                    return False
                at += 1
                if self._head in self._heads:
                    self._read_arguments("{", 0)
            elif not self._end.found:
                at = self._read_arguments(symbols, at)
            else:
                self._tail += plain_text(symbols[at]).strip(SPACE)  # without the token that ends the answer
                if not self._heads[self._head][1].startswith(self._tail):
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
        name, tail = self._heads.get(self._head, ("", ""))
        if not name or self._tail != tail:
            return []
        try:
            json.loads(arguments)
        except (ValueError, RecursionError):
            return []
        return [CallPart(0, "", new_call_id(), name), CallPart(0, arguments)]
