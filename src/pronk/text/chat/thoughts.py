"""Streaming parsers that separate the thoughts of an answer from the rest."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pronk.text.chat.arguments import JsonEnd
from pronk.text.chat.calls import CallPart, new_call_id
from pronk.text.chat.dialects import ReasoningFormat
from pronk.text.chat.symbols import TokenSymbols, plain_text
from pronk.text.stream import prefix_at_end


@dataclass(frozen=True)
class Thought:
    """A streamed part of a model's thoughts: the next characters.

    Attributes:
        text: the characters.
    """

    text: str


class ThoughtReader:
    r"""Streaming parser that splits an answer into thoughts and the text after them.

    The parser reads symbols: text in which a lone surrogate stands for each special token. Thoughts
    are recognized at the beginning of an answer only. Line breaks after the begin marker and around
    the end marker are dropped: ``<think>\na\n</think>\n\nb`` is the thought ``a`` and the text
    ``b``.

    Args:
        reasoning: format of the model's thoughts; ``None`` if the model does not think.
        symbols: symbols of the model's tokens.
        opened: whether the prompt ends with the begin marker, so that the answer begins within
            thoughts.

    Attributes:
        in_thought: whether the symbols read last are within thoughts.
    """

    def __init__(
        self, reasoning: ReasoningFormat | None, symbols: TokenSymbols, *, opened: bool
    ) -> None:
        self._begin = symbols.of_text(reasoning.begin) if reasoning else ""
        self._end = symbols.of_text(reasoning.end) if reasoning else ""
        self.in_thought = bool(reasoning) and opened
        self._may_begin = bool(reasoning) and not opened
        # white space at the beginning of the answer, which is dropped if thoughts follow
        self._space: list[str] = []
        self._held = ""  # symbols that may be the beginning of a marker
        # Whether the current part, the thoughts or the text after them, has only line breaks so
        # far.
        self._at_start = opened
        # Number of line breaks at the end of the thoughts so far. They are emitted only if further
        # thoughts follow.
        self._num_lines = 0

    def push(self, symbols: str) -> list[Thought | str]:
        """Parse the next piece of the answer; return the parts that later pieces cannot change."""
        if self._may_begin:
            if not self._held:
                stripped = symbols.lstrip()
                self._space.append(symbols[: len(symbols) - len(stripped)])
                symbols = stripped
            start = self._held + symbols
            if self._begin.startswith(start) and start != self._begin:
                self._held = start
                return []
            self._may_begin = False
            self._held = ""
            self.in_thought = start.startswith(self._begin)
            self._at_start = self.in_thought
            if self.in_thought:
                symbols = start.removeprefix(self._begin)
            else:
                symbols = "".join([*self._space, start])
        return self._think(symbols) if self.in_thought else self._after(symbols)

    def flush(self) -> list[Thought | str]:
        """End the answer, and return the withheld thoughts or text."""
        held = self._held
        self._held = ""
        if self.in_thought:
            return self._emit(held)
        if not self._may_begin:
            return []
        text = "".join([*self._space, held])
        return [text] if text else []

    def _think(self, symbols: str) -> list[Thought | str]:
        """Read thoughts, and the text after their end marker; return what cannot change later."""
        thought, end, rest = (self._held + symbols).partition(self._end)
        if end:
            self._held = ""
            thoughts = self._emit(thought)
            self.in_thought = False
            self._at_start = True
            return [*thoughts, *self._after(rest)]
        self._held = prefix_at_end(thought, self._end)
        return self._emit(thought.removesuffix(self._held))

    def _emit(self, symbols: str) -> list[Thought | str]:
        """Return the next thoughts; line breaks at the beginning and end of all are left out."""
        text = plain_text(symbols)
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        stripped = text.rstrip("\n")
        lines = self._num_lines
        self._num_lines = len(text) - len(stripped)
        if not stripped:
            self._num_lines += lines
            return []
        return [Thought("\n" * lines + stripped)]

    def _after(self, symbols: str) -> list[Thought | str]:
        """Return the next text after the thoughts, without the line breaks at its beginning."""
        if self._at_start:
            symbols = symbols.lstrip("\n")
            self._at_start = not symbols
        return [symbols] if symbols else []


_TOOL = re.compile(r"to=functions\.([a-zA-Z0-9_-]{1,64})")
_MAX_HEADER = 256  # maximum characters of a header; a longer header is text


class ChannelReader:
    """Streaming parser that splits one answer of gpt-oss into thoughts, text and tool calls.

    An answer of gpt-oss is a sequence of messages. The header of a message names the channel and,
    for a call, the tool::

        <|channel|>analysis<|message|>thoughts<|end|>
        <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
            <|message|>{…}<|call|>
        <|start|>assistant<|channel|>final<|message|>text<|return|>

    ``<|call|>`` and ``<|return|>`` end the answer, so the parser does not read these two tokens.
    Models also write the name of the tool before the channel: ``<|start|>assistant
    to=functions.f<|channel|>commentary json<|message|>``. A call of a tool that is not among
    ``names`` is text.

    Args:
        symbols: symbols of the model's tokens.
        names: names of the tools that the answer may call.
        begun: whether the prompt has the beginning of the text, so that the answer continues it.
    """

    def __init__(
        self, symbols: TokenSymbols, names: Collection[str], *, begun: bool = False
    ) -> None:
        text = symbols.of_text
        self._names = frozenset(names)
        self._channel = text("<|channel|>")
        self._message = text("<|message|>")
        # Symbols that end a message of the answer.
        self._ends = (text("<|end|>"), text("<|start|>"), self._channel)
        self._analysis = f"{self._channel}analysis"
        # symbols that are not parsed yet, because the next ones decide their meaning
        self._held = ""
        self._kind: Literal["header", "thought", "text", "call"]
        self._kind = "text" if begun else "header"
        self._num_calls = 0
        self._arguments = JsonEnd()
        # Whether the call's arguments begin like a JSON object; None until they begin.
        self._is_object: bool | None = None

    @property
    def in_call(self) -> bool:
        """Whether the text read last is within the arguments of a call."""
        return self._kind == "call" and not (self._is_object and self._arguments.found)

    @property
    def in_thought(self) -> bool:
        """Whether the text read last is within thoughts or their header."""
        if self._kind == "header":
            return self._held.startswith(self._analysis)
        return self._kind == "thought"

    def push(self, symbols: str) -> list[str | Thought | CallPart]:
        """Parse the next piece of the answer; return the parts that later pieces cannot change."""
        self._held += symbols
        output: list[str | Thought | CallPart] = []
        may_go_on = True
        while self._held and may_go_on:
            is_header = self._kind == "header"
            may_go_on = self._read_header(output) if is_header else self._read_body(output)
        return output

    def flush(self) -> list[str | Thought | CallPart]:
        """End the answer, and return the withheld text; an incomplete header is dropped."""
        held = self._held
        self._held = ""
        is_header = self._kind == "header" and held.startswith((*self._ends[1:], " to="))
        text = "" if is_header or self._kind == "call" else plain_text(held)
        return [self._part(text)] if text else []

    def _read_header(self, output: list[str | Thought | CallPart]) -> bool:
        """Read the header of a message.

        Return False if the header is not complete yet, so that further symbols are needed.
        """
        starts = (*self._ends[1:], " to=", "assistant")
        held = self._held
        if not any(held.startswith(start) or start.startswith(held) for start in starts):
            self._kind = "text"  # the answer, or this message, begins without a header
            return True
        header, message, rest = self._held.partition(self._message)
        if len(header) > _MAX_HEADER:
            self._kind = "text"
            return True
        if not message:
            return False
        self._held = rest
        tool = _TOOL.search(header)
        if tool is not None and tool[1] in self._names:
            self._kind = "call"
            self._arguments = JsonEnd()
            self._is_object = None
            output.append(CallPart(self._num_calls, "", new_call_id(), tool[1]))
            self._num_calls += 1
        else:
            self._kind = "thought" if self._analysis in header else "text"
        return True

    def _read_body(self, output: list[str | Thought | CallPart]) -> bool:
        """Read the body of a message.

        Return False if the body may go on with the next symbols.
        """
        found = [self._held.find(end) for end in self._ends]
        stops = [at for at in found if at >= 0]
        if stops:
            stop = min(stops)
        else:
            beginnings = [prefix_at_end(self._held, end) for end in self._ends]
            stop = len(self._held) - max(map(len, beginnings))
        body = plain_text(self._held[:stop])
        self._held = self._held[stop:]
        if body and self._kind == "call":
            self._read_arguments(body, output)
        elif body:
            output.append(self._part(body))
        if stops:
            self._kind = "header"
            self._held = self._held.removeprefix(self._ends[0])
        return bool(stops)

    def _read_arguments(self, text: str, output: list[str | Thought | CallPart]) -> None:
        """Read a part of a call's arguments, and append what is final to ``output``.

        Arguments that are a JSON object end at its last brace. Other arguments are emitted as they
        are.
        """
        if self._is_object is None:
            text = text.lstrip()
            self._is_object = text.startswith("{") if text else None
        elif self._is_object and self._arguments.found:
            return  # text after the object's last brace is dropped
        if self._is_object:
            _, text = self._arguments.read(text, 0)
        if text:
            output.append(CallPart(self._num_calls - 1, text))

    def _part(self, text: str) -> str | Thought:
        return Thought(text) if self._kind == "thought" else text
