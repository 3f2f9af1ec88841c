"""Format of a model's answers: thoughts, text and tool calls; how answers are parsed and forced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pronk.base.errors import PromptError
from pronk.text.chat.answer_grammar import MAX_CALLS, AnswerGrammar
from pronk.text.chat.calls import BareCallReader, CallPart, CallReader
from pronk.text.chat.dialects import (
    REASONING_FORMATS,
    ReasoningFormat,
    TokenSymbols,
    ToolDialect,
    find_tool_dialect,
    plain_text,
)
from pronk.text.chat.template import in_channels, nearest_effort
from pronk.text.chat.thoughts import ChannelReader, Thought, ThoughtReader
from pronk.text.thinking import ThinkingMarkers
from pronk.text.tokenizer import Tokenizer

Part = str | Thought | CallPart  # text, thoughts, or a part of a call


@dataclass(frozen=True)
class AnswerFormat:
    """Format of one model's answers."""

    tokenizer: Tokenizer

    @cached_property
    def symbols(self) -> TokenSymbols:
        """Symbols of the model's tokens."""
        return TokenSymbols(self.tokenizer)

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """Format of thoughts.

        ``None`` if the model does not think: its chat template has no thoughts.
        """
        source = self.tokenizer.chat_template or ""
        return next((row for row in REASONING_FORMATS if row.template in source), None)

    @cached_property
    def dialect(self) -> ToolDialect | PromptError:
        """Format of tool calls, or the error that says why the model has none."""
        try:
            return find_tool_dialect(self.tokenizer)
        except PromptError as error:
            return error

    @cached_property
    def thinking_markers(self) -> ThinkingMarkers | None:
        """Markers for the thinking budget; ``None`` if the model does not think."""
        row = self.reasoning
        symbols = self.symbols
        if row is None:
            return None
        begin = symbols.of_text(row.begin)
        end = symbols.of_text(row.end)
        end_ids = tuple(self.tokenizer.encode(row.end, add_special_tokens=False))
        return ThinkingMarkers(begin, end, end_ids, symbols.of_token, repeats=bool(row.before_text))

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the begin marker of thoughts."""
        return self.thinking_markers is not None and self.thinking_markers.opened_by(prompt)

    def nearest_effort(self, effort: str) -> str:
        """Return the effort that the chat template follows: ``on`` if it can only switch thinking on."""
        source = self.tokenizer.chat_template or ""
        followed = (
            nearest_effort({"reasoning_effort": effort})
            if in_channels(source)
            else {"reasoning_effort": effort}
        )
        return (
            str(followed["reasoning_effort"])
            if effort == "none" or "reasoning_effort" in source
            else "on"
        )

    def grammar(self, *, tools: bool) -> AnswerGrammar:
        """Return the builder of grammars.

        With ``tools``, a model without calls raises a PromptError.
        """
        return AnswerGrammar(self.symbols, self._dialect() if tools else None, self.reasoning)

    def reader(
        self, names: Collection[str], *, opened: bool, has_form: bool = False
    ) -> AnswerReader:
        """Return a parser of one answer that may call tools ``names``.

        For ``opened``, see :meth:`opened_by`.

        ``has_form``: whether text has a required form, such as JSON; then calls have markers.
        """
        dialect = self._dialect() if names else None
        if has_form and dialect is not None:
            dialect = replace(dialect, allows_bare=False)
        return AnswerReader(self.symbols, dialect, self.reasoning, names, opened=opened)

    def _dialect(self) -> ToolDialect:
        if isinstance(self.dialect, PromptError):
            raise self.dialect
        return self.dialect


class AnswerReader:
    """Streaming parser that splits one answer into thoughts, text and calls of the tools ``names``.

    The answer has no calls without ``dialect``, and no thoughts without ``reasoning``. ``opened``:
    whether the prompt ends with the begin marker of thoughts.
    """

    def __init__(
        self,
        symbols: TokenSymbols,
        dialect: ToolDialect | None,
        reasoning: ReasoningFormat | None,
        names: Collection[str] = (),
        *,
        opened: bool = False,
    ) -> None:
        self._symbols = symbols
        in_channels = any(row is not None and row.before_text for row in (dialect, reasoning))
        self._channels = ChannelReader(symbols, names) if in_channels else None
        self._thoughts = ThoughtReader(reasoning, symbols, opened=opened)
        self._calls = None if dialect is None else CallReader(dialect, symbols, names)
        self._bare = BareCallReader(names) if dialect is not None and dialect.allows_bare else None

    @property
    def in_call(self) -> bool:
        """Whether the text read last is within a call, after the name of the tool."""
        reader = self._channels or self._calls
        return reader is not None and reader.in_call

    @property
    def in_thought(self) -> bool:
        """Whether the text read last is within thoughts."""
        return (self._channels or self._thoughts).in_thought

    def push(self, text: str, token: int | None = None) -> list[Part]:
        """Parse the next token of the answer; return parts that later tokens cannot change.

        ``text`` is empty for a special token and for one that completes no character.
        """
        symbols = text + self._symbols.of_special(token)
        if self._channels is not None:
            return _join(self._channels.push(symbols))
        return self._read_calls(self._thoughts.push(symbols))

    def flush(self) -> list[Part]:
        """End the answer.

        Return the text held back, without an incomplete call after a complete one.
        """
        if self._channels is not None:
            return _join(self._channels.flush())
        parts = self._read_calls(self._thoughts.flush())
        if self._calls is None:
            return parts
        if self._bare is not None:
            if call := self._bare.flush():
                return [*parts, *call]
            parts += self._calls.push(self._bare.held)
        return _join([*parts, *self._calls.flush()])

    def _read_calls(self, parts: Sequence[Thought | str]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            if isinstance(part, Thought):
                read.append(part)
            elif self._bare is not None:
                if not self._bare.push(part):
                    held = self._bare.held
                    self._bare = None
                    read += self._read_calls([held])
            elif self._calls is not None:
                read += self._calls.push(part)
            else:
                read.append(plain_text(part))
        return _join(read)


@dataclass(frozen=True)
class AnswerCalls:
    """Calls that an answer may have.

    Attributes:
        names: names of the tools.
        has_form: whether text has a required form, see :meth:`AnswerFormat.reader`.
    """

    names: tuple[str, ...]
    has_form: bool = False


class RepeatedCalls:
    """Reads a growing answer, to end it with the first call that repeats an earlier one.

    Small models often repeat a call until the length limit ends the answer. An answer also ends
    where a call after the first ``MAX_CALLS`` begins.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._calls = set[tuple[str, str]]()  # names and arguments of the complete calls
        # name of the call that is being read, and its arguments so far
        self._name: str | None = None
        self._arguments = ""

    def push(self, text: str, token: int) -> bool:
        """Read the next token.

        Return whether it completes a repetition, or begins a call too many.
        """
        for part in self._reader.push(text, token):
            if not isinstance(part, CallPart):
                self._end_call()
                continue
            if part.name is not None:
                self._end_call()
                self._name = part.name
            self._arguments += part.arguments
            # Arguments are one JSON object, and no proper beginning of an object is an object
            # itself. If the text so far equals the complete arguments of an earlier call, it is
            # therefore complete.
            is_repeated = self._arguments != "" and (self._name, self._arguments) in self._calls
            if is_repeated or len(self._calls) >= MAX_CALLS:
                return True
        if not self._reader.in_call:
            self._end_call()
        return False

    def _end_call(self) -> None:
        if self._name is not None:
            self._calls.add((self._name, self._arguments))
        self._name = None
        self._arguments = ""


def _join(parts: Sequence[Part]) -> list[Part]:
    """Join successive texts, thoughts, and parts of one call; drop empty texts."""
    joined: list[Part] = []
    for part in parts:
        match joined[-1:], part:
            case [str(last)], str():
                joined[-1] = last + part
            case [Thought(last)], Thought(text):
                joined[-1] = Thought(last + text)
            case [CallPart() as last], CallPart() if (last.index, last.name) == (
                part.index,
                part.name,
            ):
                joined[-1] = replace(last, arguments=last.arguments + part.arguments)
            case _ if part != "":
                joined.append(part)
    return joined
