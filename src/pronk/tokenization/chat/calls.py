"""Streaming parser that separates the tool calls in an answer from its text.

The parser holds text back only while that text may be the beginning of a call. If it turns out not to be (it names an
unknown tool, for instance), it is emitted as text. The arguments of a call are emitted as the model writes them, even
if the answer ends within them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from secrets import token_hex

from pronk.tokenization.chat.tools import TOOL_NAME, ToolCallFormat

__all__ = ["CallPart", "CallReader"]

_MAX_CALL_START = 200  # characters of a call up to its tool's name; names of tools have up to 64
_BRACKETS, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


@dataclass(frozen=True)
class CallPart:
    """Streamed part of a tool call."""

    index: int  # number of the call within the answer, from 0
    arguments: str = ""  # next characters of the arguments' JSON
    ident: str | None = None  # id of the call, in the call's first part only
    name: str | None = None  # name of the tool, in the call's first part only


class CallReader:
    """Streaming parser of one answer.

    White space at the beginning of the answer and after a call is text only if other text follows.

    Args:
        form: format of the model's calls.
        names: names of the tools that the model may call.
    """

    def __init__(self, form: ToolCallFormat, names: Collection[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self._trigger = form.begin.decoded if form.begin else ""  # text that begins a call, if any
        self._output: list[str | CallPart] = []
        self._count = 0
        self._held_space: list[str] = []  # white space held back
        self._only_space = True  # only white space was read since the beginning or the last call
        self._expected: Mapping[str, Callable[[], None]] = {}  # texts that may come next, and the action after each
        self._seen = self._before = ""  # characters of an expected text read so far; text held back before them
        self._in_call = False  # between the name of a tool and the end of its call
        self._depth, self._quoted, self._escaped = 0, False, False
        self._read: Callable[[str, int], int] = self._read_text
        if form.marker_optional:
            self._expect_call("")

    @property
    def called(self) -> bool:
        """Whether the answer has contained a call so far."""
        return self._count > 0

    @property
    def calling(self) -> bool:
        """Whether the text read last is within a call, after the name of the tool."""
        return self._in_call

    def push(self, text: str, token: int | None = None) -> list[str | CallPart]:
        """Parse the next token of the answer; return the texts and call parts that are certain by now.

        Args:
            text: text of the token; empty for a special token and for one that completes no character.
            token: id of the token.
        """
        self._feed(text)
        begin = self._form.begin
        if begin is not None and begin.is_special and token == begin.token:
            self._release_all()
            if self._read == self._read_text:
                self._expect_call("")
        elif token in self._form.other_tokens and not self._in_call:
            self._release_all()  # no call contains these tokens before its name
        return self._take_output()

    def flush(self) -> list[str | CallPart]:
        """End the answer; return the text held back, except an incomplete call right after another call."""
        if not self._in_call and not (self._count and self._only_space):
            self._release_all()
        if self._held_space and not self._count:
            self._output.append("".join(self._held_space))
        self._held_space = []
        return self._take_output()

    def _take_output(self) -> list[str | CallPart]:
        """Return and clear the output; adjacent texts are joined, and so are adjacent parts of a call."""
        parts, self._output = self._output, []
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
        """Read text up to the first character of the trigger; no trigger contains this character twice."""
        stop = text.find(self._trigger[0], at) if self._trigger else -1
        stop = len(text) if stop < 0 else stop
        self._emit_text(text[at:stop])
        if stop < len(text):
            self._expect({self._trigger: lambda: self._expect_call(self._trigger)})
        return stop

    def _emit_text(self, text: str) -> None:
        if self._only_space:
            begun = text.lstrip()
            self._held_space.append(text[: len(text) - len(begun)])
            if begun:
                self._output += [*self._held_space, begun]
                self._held_space, self._only_space = [], False
        elif text:
            self._output.append(text)

    def _expect(self, expected: Mapping[str, Callable[[], None]], before: str = "") -> None:
        self._expected, self._seen, self._before = expected, "", before
        self._read = self._read_expected

    def _read_expected(self, text: str, at: int) -> int:
        seen = self._seen + text[at]
        if seen in self._expected:
            self._seen = seen
            self._expected[seen]()
        elif any(each.startswith(seen) for each in self._expected):
            self._seen = seen
        else:
            self._release()
            return at
        return at + 1

    def _expect_call(self, before: str) -> None:
        """Expect the text between the begin marker and the name of the tool; ``before`` is the marker's text.

        Some tokenizers drop a space at the beginning of a text, so the leading space of the opening may be missing.
        """
        openings = {self._form.opening, self._form.opening.lstrip(" ")}
        self._expect({f"{opening}{self._form.head}": self._begin_name for opening in openings}, before)

    def _begin_name(self) -> None:
        self._read = self._read_name

    def _read_name(self, text: str, at: int) -> int:
        letter = text[at]
        if letter != '"':
            if TOOL_NAME.fullmatch(letter) is None or len(self._seen) > _MAX_CALL_START:
                self._release()
                return at
            self._seen += letter
            return at + 1
        name = self._seen.rpartition('"')[2]
        if name not in self._names:
            self._release()
            return at
        self._output.append(CallPart(self._count, "", f"call_{token_hex(12)}", name))
        self._count += 1
        self._held_space, self._only_space, self._in_call = [], True, True
        self._expect({self._form.middle + "{": self._begin_arguments})
        return at  # this quotation mark is the first character of form.middle

    def _begin_arguments(self) -> None:
        self._output.append(CallPart(self._count - 1, "{"))
        self._depth, self._quoted, self._escaped = 1, False, False
        self._read = self._read_arguments

    def _read_arguments(self, text: str, at: int) -> int:
        """Read up to the brace that closes the arguments, or to the end of ``text``."""
        stop = at
        while stop < len(text) and self._depth:
            if self._escaped:
                self._escaped, stop = False, stop + 1
                continue
            found = (_IN_STRING if self._quoted else _BRACKETS).search(text, stop)
            if found is None:
                stop = len(text)
                break
            self._update_nesting(found[0])
            stop = found.end()
        if stop > at:
            self._output.append(CallPart(self._count - 1, text[at:stop]))
        if not self._depth:
            self._expect(self._after_arguments)
        return stop

    def _update_nesting(self, mark: str) -> None:
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._quoted = not self._quoted
        else:
            self._depth += 1 if mark in "{[" else -1

    @property
    def _after_arguments(self) -> Mapping[str, Callable[[], None]]:
        """Texts that may follow the arguments, and the action after each."""
        form = self._form
        end = "}" + form.closing + (form.end.decoded if form.end else "")
        more = {f"}}{form.separator}{form.head}": self._begin_name} if form.separator else {}
        return {end: self._end, **more}

    def _end(self) -> None:
        self._read, self._in_call = self._read_text, False

    def _release_all(self) -> None:
        """Emit all text held back: it is no beginning of a call."""
        while self._read in (self._read_expected, self._read_name):
            self._release()

    def _release(self) -> None:
        """Emit the text held back; a call that begins within it is held back again."""
        in_trigger, seen, before = self._trigger in self._expected, self._seen, self._before
        self._end()
        self._seen = self._before = ""
        if in_trigger or not self._trigger:
            self._emit_text(before + seen)
        else:
            self._emit_text(before)
            self._feed(seen)
