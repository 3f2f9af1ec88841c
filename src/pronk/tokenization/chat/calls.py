"""Streaming parser that separates the tool calls in an answer from its text.

The parser holds text back only while that text may be the beginning of a call. Text that turns out to be no call (it
names an unknown tool, for instance) is emitted as text. The arguments of a call are emitted as the model writes them,
even if the answer ends within them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from secrets import token_hex

from pronk.tokenization.chat.tools import TOOL_NAME, ToolCallFormat

__all__ = ["CallPart", "CallReader"]

_MAX_CALL_START = 200  # maximum characters from a call's beginning to the end of its tool's name, which has up to 64
_OUTSIDE_STRING = re.compile(r'["{}\[\]]')  # characters of JSON that begin a string or change the nesting
_INSIDE_STRING = re.compile(r'["\\]')  # characters of JSON that end a string or escape the next character


@dataclass(frozen=True)
class CallPart:
    """Streamed part of a tool call."""

    index: int  # number of the call within the answer, from 0
    arguments: str = ""  # next characters of the arguments' JSON
    ident: str | None = None  # id of the call; ``None`` except in the call's first part
    name: str | None = None  # name of the tool; ``None`` except in the call's first part


class CallReader:
    """Streaming parser that splits one answer into text and tool calls.

    White space at the beginning or after a call is dropped unless other text follows; an answer of white space is text.

    Args:
        call_format: format of the model's calls.
        names: names of the tools that the model may call.
    """

    def __init__(self, call_format: ToolCallFormat, names: Collection[str]) -> None:
        self._format, self._names = call_format, frozenset(names)
        self._trigger = call_format.begin.decoded if call_format.begin else ""  # text of the begin marker, if any
        self._output: list[str | CallPart] = []
        self._num_calls = 0  # number of calls so far
        self._held_space: list[str] = []  # white space that is not emitted yet
        self._only_space = True  # whether the answer, or the text after its last call, is only white space so far
        self._expected: Mapping[str, Callable[[], None]] = {}  # texts that may come next; method to call after each
        self._seen = ""  # the part of an expected text that was read so far, and the name of the tool after it
        self._before = ""  # the begin marker read before ``_seen``; like ``_seen``, it is not emitted yet
        self._in_call = False  # whether the name of a tool has been read, but not the end of its call
        # Within the arguments: number of open brackets; whether in a string; whether right after a backslash.
        self._depth, self._quoted, self._escaped = 0, False, False
        # State of the parser: the method that reads the text from an offset on and returns the next offset.
        self._read: Callable[[str, int], int] = self._read_text
        if call_format.marker_optional:
            self._expect_call("")

    @property
    def has_calls(self) -> bool:
        """Whether the answer has contained a call so far."""
        return self._num_calls > 0

    @property
    def in_call(self) -> bool:
        """Whether the text read last is within a call, after the name of the tool."""
        return self._in_call

    def push(self, text: str, token: int | None = None) -> list[str | CallPart]:
        """Parse the next token of the answer; return texts and call parts that later tokens cannot change.

        Args:
            text: text of the token; empty for a special token and for one that completes no character.
            token: id of the token.
        """
        self._feed(text)
        begin = self._format.begin
        if begin is not None and begin.is_special and token == begin.token:
            self._release_all()
            if self._read == self._read_text:
                self._expect_call("")
        elif token in self._format.id_only_tokens and not self._in_call:
            self._release_all()  # such a token cannot be part of a call's beginning
        return self._take_output()

    def flush(self) -> list[str | CallPart]:
        """End the answer; return the text held back, but drop the beginning of another call after a call."""
        if not self._in_call and not (self._num_calls and self._only_space):
            self._release_all()
        if self._held_space and not self._num_calls:
            self._output.append("".join(self._held_space))
        self._held_space = []
        return self._take_output()

    def _take_output(self) -> list[str | CallPart]:
        """Return and clear the output; join successive texts, and successive parts of one call."""
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
        """Read text that is no call, up to the next character that may begin a begin marker (``<``)."""
        stop = text.find(self._trigger[0], at) if self._trigger else -1
        stop = len(text) if stop < 0 else stop
        self._emit_text(text[at:stop])
        if stop < len(text):
            self._expect({self._trigger: lambda: self._expect_call(self._trigger)})
        return stop

    def _emit_text(self, text: str) -> None:
        if self._only_space:
            stripped = text.lstrip()
            self._held_space.append(text[: len(text) - len(stripped)])
            if stripped:
                self._output += [*self._held_space, stripped]
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
        elif any(expected.startswith(seen) for expected in self._expected):
            self._seen = seen
        else:
            self._release()
            return at
        return at + 1

    def _expect_call(self, before: str) -> None:
        """Begin to read the text between the begin marker, whose text is ``before``, and the tool's name.

        Some tokenizers drop a space at the beginning of a text, so a leading space of ``after_begin`` may be missing.
        """
        after_begin = self._format.after_begin
        texts = {f"{text}{self._format.before_name}" for text in (after_begin, after_begin.lstrip(" "))}
        self._expect(dict.fromkeys(texts, self._begin_name), before)

    def _begin_name(self) -> None:
        self._read = self._read_name

    def _read_name(self, text: str, at: int) -> int:
        character = text[at]
        if character != '"':
            if TOOL_NAME.fullmatch(character) is None or len(self._seen) > _MAX_CALL_START:
                self._release()
                return at
            self._seen += character
            return at + 1
        name = self._seen.rpartition('"')[2]
        if name not in self._names:
            self._release()
            return at
        self._output.append(CallPart(self._num_calls, "", f"call_{token_hex(12)}", name))
        self._num_calls += 1
        self._held_space, self._only_space, self._in_call = [], True, True
        self._expect({self._format.before_arguments + "{": self._begin_arguments})
        return at  # the quotation mark at this offset is the first character of ``before_arguments``

    def _begin_arguments(self) -> None:
        self._output.append(CallPart(self._num_calls - 1, "{"))
        self._depth, self._quoted, self._escaped = 1, False, False
        self._read = self._read_arguments

    def _read_arguments(self, text: str, at: int) -> int:
        """Read the arguments, up to their last brace or the end of ``text``; return the next offset."""
        stop = at
        while stop < len(text) and self._depth:
            if self._escaped:
                self._escaped, stop = False, stop + 1
                continue
            match = (_INSIDE_STRING if self._quoted else _OUTSIDE_STRING).search(text, stop)
            if match is None:
                stop = len(text)
                break
            self._update_nesting(match[0])
            stop = match.end()
        if stop > at:
            self._output.append(CallPart(self._num_calls - 1, text[at:stop]))
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
        """Texts that may follow the arguments, each with the method to call when it has been read."""
        call_format = self._format
        end = "}" + call_format.before_end + (call_format.end.decoded if call_format.end else "")
        next_call = f"}}{call_format.separator}{call_format.before_name}"
        return {end: self._end, **({next_call: self._begin_name} if call_format.separator else {})}

    def _end(self) -> None:
        self._read, self._in_call = self._read_text, False

    def _release_all(self) -> None:
        """Emit all text held back, because it is not the beginning of a call."""
        while self._read in (self._read_expected, self._read_name):
            self._release()

    def _release(self) -> None:
        """Emit the text held back, but parse ``_seen`` once more if a call may begin within it."""
        in_trigger, seen, before = self._trigger in self._expected, self._seen, self._before
        self._end()
        self._seen = self._before = ""
        if in_trigger or not self._trigger:
            # No other begin marker begins within ``seen``: no marker contains its first character twice.
            self._emit_text(before + seen)
        else:
            self._emit_text(before)
            self._feed(seen)
