"""Calls of tools, read as they come: what is text, which tool is called, and with which arguments.

Everything is read once. Text is held back only where it may be the beginning of a call; what turns out to be none, a
call of a tool that there is not for instance, is text after all. Arguments are handed on as they are written, even if
they are cut off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from secrets import token_hex

from pronk.tokenization.chat.tools import TOOL_NAME, ToolForm

__all__ = ["CallPart", "CallReader"]

_BRACKETS, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


@dataclass(frozen=True)
class CallPart:
    """What has come of a call.

    Attributes:
        index: which of the answer's calls it is.
        arguments: more of their text.
        ident: of the call, in its first part.
        name: of the tool, likewise.
    """

    index: int
    arguments: str = ""
    ident: str | None = None
    name: str | None = None


class CallReader:
    """Reads one answer.

    White space at its beginning, and behind calls, is text only if other text follows it.

    Args:
        form: how the model calls.
        names: of the tools that it may call.
    """

    def __init__(self, form: ToolForm, names: Collection[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self._trigger = form.begin.spelled if form.begin else ""
        self._out: list[str | CallPart] = []
        self._count = 0
        self._blanks: list[str] = []
        self._blank = True  # nothing but white space has come since the beginning, or the last call
        # Of what is being read: what may follow and what is done then, what of it has come, and what came before it.
        self._awaited: Mapping[str, Callable[[], None]] = {}
        self._seen = self._before = ""
        self._within = False  # between a tool's name and what ends its call
        self._depth, self._quoted, self._escaped = 0, False, False
        self._read: Callable[[str, int], int] = self._read_text
        if form.bare:
            self._open("")

    @property
    def called(self) -> bool:
        """Whether any call has begun."""
        return self._count > 0

    @property
    def calling(self) -> bool:
        """Whether a call has begun that has not ended."""
        return self._within

    def push(self, text: str, token: int | None = None) -> list[str | CallPart]:
        """What has become certain: texts, and parts of calls.

        Args:
            text: what has become final.
            token: with which token; some begin a call, and read as nothing.
        """
        self._feed(text)
        begin = self._form.begin
        if begin is not None and begin.silent and token == begin.token:
            self._settle()
            if self._read == self._read_text:
                self._open("")
        elif token in self._form.others and not self._within:
            self._settle()  # no call begins across it
        return self._taken()

    def flush(self) -> list[str | CallPart]:
        """What was held back, at the end of the answer; nothing of a call that was cut off, or of another behind it."""
        if not self._within and not (self._count and self._blank):
            self._settle()
        if self._blanks and not self._count:
            self._out.append("".join(self._blanks))
        self._blanks = []
        return self._taken()

    def _taken(self) -> list[str | CallPart]:
        """Neighbouring texts, and neighbouring parts of one call's arguments, are one."""
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
        """Up to what may begin a call. A trigger has its first character only once."""
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
        """A call begins, if what stands before its tool's name comes.

        A tokenizer may read no space where a text begins.
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
        return at  # of which this quotation mark is the first character

    def _begin_arguments(self) -> None:
        self._out.append(CallPart(self._count - 1, "{"))
        self._depth, self._quoted, self._escaped = 1, False, False
        self._read = self._read_arguments

    def _read_arguments(self, text: str, at: int) -> int:
        """Up to the bracket that closes them, or to the end of what has come."""
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
        """What may follow the arguments."""
        form = self._form
        end = "}" + form.closing + (form.end.spelled if form.end else "")
        more = {f"}}{form.joint}{form.head}": self._begin_name} if form.joint else {}
        return {end: self._end, **more}

    def _end(self) -> None:
        self._read, self._within = self._read_text, False

    def _settle(self) -> None:
        """Nothing is to come any more of what may have begun."""
        while self._read in (self._read_awaited, self._read_name):
            self._give_up()

    def _give_up(self) -> None:
        """What has come is no call, or no more of it: text, in which one may begin all the same."""
        begun, seen, before = self._trigger in self._awaited, self._seen, self._before
        self._end()
        self._seen = self._before = ""
        if begun or not self._trigger:
            self._say(before + seen)
        else:
            self._say(before)
            self._feed(seen)
