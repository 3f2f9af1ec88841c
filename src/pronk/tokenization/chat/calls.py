"""Streaming parser that separates the calls of tools in an answer from its text.

The parser reads each character once. It holds text back only while that text may begin a call. Text that turns out not
to begin a call (it names an unknown tool, for instance) is emitted as text. Arguments are emitted as the model writes
them, even if the answer ends within them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from secrets import token_hex

from pronk.tokenization.chat.tools import TOOL_NAME, ToolCallFormat

__all__ = ["CallPart", "CallReader"]

_BRACKETS, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


@dataclass(frozen=True)
class CallPart:
    """Part of a call."""

    index: int  # number of the call within the answer, from 0
    arguments: str = ""  # the next piece of the arguments' JSON
    ident: str | None = None  # id of the call, in its first part only
    name: str | None = None  # name of the tool, in the first part only


class CallReader:
    """Parser of one answer.

    White space at the beginning of the answer and after a call is text only if other text follows it.

    Args:
        form: the format of the model's calls.
        names: names of the tools that the model may call.
    """

    def __init__(self, form: ToolCallFormat, names: Collection[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self._trigger = form.begin.decoded if form.begin else ""
        self._out: list[str | CallPart] = []
        self._count = 0
        self._blanks: list[str] = []
        self._blank = True  # only white space was read since the beginning or the last call
        # While a fixed text is expected: the possible texts with the function that follows each, the characters of
        # the text that were read, and the text held back before them.
        self._awaited: Mapping[str, Callable[[], None]] = {}
        self._seen = self._before = ""
        self._within = False  # between the name of a tool and the end of its call
        self._depth, self._quoted, self._escaped = 0, False, False
        self._read: Callable[[str, int], int] = self._read_text
        if form.marker_optional:
            self._open("")

    @property
    def called(self) -> bool:
        """Whether the answer has a call."""
        return self._count > 0

    @property
    def calling(self) -> bool:
        """Whether the parser is within a call."""
        return self._within

    def push(self, text: str, token: int | None = None) -> list[str | CallPart]:
        """Parse the next piece of the answer and return the texts and parts of calls that are certain.

        Args:
            text: the next piece of text.
            token: id of the token that the text belongs to. A special token that begins a call has no text.
        """
        self._feed(text)
        begin = self._form.begin
        if begin is not None and begin.is_special and token == begin.token:
            self._settle()
            if self._read == self._read_text:
                self._open("")
        elif token in self._form.other_tokens and not self._within:
            self._settle()  # the beginning of a call cannot contain a special token
        return self._taken()

    def flush(self) -> list[str | CallPart]:
        """End the answer; return the text that was held back, without an incomplete later call."""
        if not self._within and not (self._count and self._blank):
            self._settle()
        if self._blanks and not self._count:
            self._out.append("".join(self._blanks))
        self._blanks = []
        return self._taken()

    def _taken(self) -> list[str | CallPart]:
        """Return the output so far, with adjacent texts, and adjacent pieces of the same arguments, joined."""
        parts, self._out = self._out, []
        joined = list[str | CallPart]()
        for _, group in groupby(parts, lambda part: None if isinstance(part, str) else (part.index, part.name)):
            first, *rest = group
            if isinstance(first, CallPart):
                arguments = "".join(part.arguments for part in (first, *rest) if isinstance(part, CallPart))
                joined.append(replace(first, arguments=arguments))
            elif text := "".join(part for part in (first, *rest) if isinstance(part, str)):
                joined.append(text)
        return joined

    def _feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self._read(text, at)

    def _read_text(self, text: str, at: int) -> int:
        """Read up to the first character of the trigger, which no trigger contains twice."""
        stop = text.find(self._trigger[0], at) if self._trigger else -1
        stop = len(text) if stop < 0 else stop
        self._say(text[at:stop])
        if stop < len(text):
            self._await({self._trigger: lambda: self._open(self._trigger)})
        return stop

    def _say(self, text: str) -> None:
        if self._blank:
            begun = text.lstrip()
            self._blanks.append(text[: len(text) - len(begun)])
            if begun:
                self._out += [*self._blanks, begun]
                self._blanks, self._blank = [], False
        elif text:
            self._out.append(text)

    def _await(self, awaited: Mapping[str, Callable[[], None]], before: str = "") -> None:
        self._awaited, self._seen, self._before = awaited, "", before
        self._read = self._read_awaited

    def _read_awaited(self, text: str, at: int) -> int:
        seen = self._seen + text[at]
        if seen in self._awaited:
            self._seen = seen
            self._awaited[seen]()
        elif any(each.startswith(seen) for each in self._awaited):
            self._seen = seen
        else:
            self._give_up()
            return at
        return at + 1

    def _open(self, before: str) -> None:
        """Expect the text between the beginning of a call and the name of the tool.

        Some tokenizers drop a space at the beginning of a text, so the opening may come without its leading space.
        """
        openings = {self._form.opening, self._form.opening.lstrip(" ")}
        self._await({f"{opening}{self._form.head}": self._begin_name for opening in openings}, before)

    def _begin_name(self) -> None:
        self._read = self._read_name

    def _read_name(self, text: str, at: int) -> int:
        letter = text[at]
        if letter != '"':
            if TOOL_NAME.fullmatch(letter) is None or len(self._seen) > 200:
                self._give_up()
                return at
            self._seen += letter
            return at + 1
        name = self._seen.rpartition('"')[2]
        if name not in self._names:
            self._give_up()
            return at
        self._out.append(CallPart(self._count, "", f"call_{token_hex(12)}", name))
        self._count += 1
        self._blanks, self._blank, self._within = [], True, True
        self._await({self._form.middle + "{": self._begin_arguments})
        return at  # the quotation mark is the first character of form.middle

    def _begin_arguments(self) -> None:
        self._out.append(CallPart(self._count - 1, "{"))
        self._depth, self._quoted, self._escaped = 1, False, False
        self._read = self._read_arguments

    def _read_arguments(self, text: str, at: int) -> int:
        """Read up to the bracket that closes the arguments, or to the end of the text."""
        stop = at
        while stop < len(text) and self._depth:
            if self._escaped:
                self._escaped, stop = False, stop + 1
                continue
            found = (_IN_STRING if self._quoted else _BRACKETS).search(text, stop)
            if found is None:
                stop = len(text)
                break
            self._mark(found[0])
            stop = found.end()
        if stop > at:
            self._out.append(CallPart(self._count - 1, text[at:stop]))
        if not self._depth:
            self._await(self._after)
        return stop

    def _mark(self, mark: str) -> None:
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._quoted = not self._quoted
        else:
            self._depth += 1 if mark in "{[" else -1

    @property
    def _after(self) -> Mapping[str, Callable[[], None]]:
        """The texts that may follow the arguments."""
        form = self._form
        end = "}" + form.closing + (form.end.decoded if form.end else "")
        more = {f"}}{form.separator}{form.head}": self._begin_name} if form.separator else {}
        return {end: self._end, **more}

    def _end(self) -> None:
        self._read, self._within = self._read_text, False

    def _settle(self) -> None:
        """Treat the beginning of a call that was held back as text."""
        while self._read in (self._read_awaited, self._read_name):
            self._give_up()

    def _give_up(self) -> None:
        """Emit the text held back as text; a call may begin within it."""
        begun, seen, before = self._trigger in self._awaited, self._seen, self._before
        self._end()
        self._seen = self._before = ""
        if begun or not self._trigger:
            self._say(before + seen)
        else:
            self._say(before)
            self._feed(seen)
