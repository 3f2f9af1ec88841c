"""Formats of models' answers, and the parser that finds thoughts, text and tool calls in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pronk.base.errors import PromptError
from pronk.text.chat.answer_grammar import MAX_CALLS, AnswerGrammar
from pronk.text.chat.calls import BareCallReader, CallPart, CallReader
from pronk.text.chat.dialects import (
    GENERIC,
    REASONING_FORMATS,
    ReasoningFormat,
    ToolDialect,
    find_tool_dialect,
)
from pronk.text.chat.symbols import TokenSymbols, plain_text
from pronk.text.chat.template import in_channels, nearest_effort
from pronk.text.chat.thoughts import ChannelReader, Thought, ThoughtReader
from pronk.text.thinking import ThinkingMarkers
from pronk.text.tokenizer import Tokenizer

Part = str | Thought | CallPart  # text, thoughts, or a part of a tool call


@dataclass(frozen=True)
class AnswerFormat:
    """Format of one model's answers: how the model writes thoughts and tool calls.

    The model's tokenizer and chat template determine the format.

    Attributes:
        tokenizer: the model's tokenizer, with its chat template.
    """

    tokenizer: Tokenizer

    @cached_property
    def symbols(self) -> TokenSymbols:
        """Symbols of the model's tokens: texts, and a lone surrogate for each special token."""
        return TokenSymbols(self.tokenizer)

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """Format of thoughts; ``None`` if the chat template shows that the model writes none."""
        source = self.tokenizer.chat_template or ""
        return next((row for row in REASONING_FORMATS if row.template in source), None)

    @cached_property
    def dialect(self) -> ToolDialect | str:
        """Format of tool calls; or the reason why the model has no known format.

        The reason is text: an error would keep the frames that have raised it, with their request.
        """
        try:
            return find_tool_dialect(self.tokenizer)
        except PromptError as error:
            return str(error)

    def problem_with_tools(self, *, allow_generic: bool) -> str | None:
        """Return why the model cannot have tools; ``None`` if it can.

        Args:
            allow_generic: whether tools may be described in the system message, if the chat
                template has none.
        """
        if isinstance(self.dialect, str):
            return self.dialect.removeprefix("tools: ")
        if self.dialect.name == GENERIC and not allow_generic:
            return (
                "expected a model whose chat template has tools, found one without; use another "
                "model, or leave --no-generic-tools out"
            )
        return None

    @cached_property
    def thinking_markers(self) -> ThinkingMarkers | None:
        """Markers of thoughts, for a thinking budget; ``None`` if the model does not think."""
        row = self.reasoning
        symbols = self.symbols
        if row is None:
            return None
        begin = symbols.of_text(row.begin)
        end = symbols.of_text(row.end)
        end_ids = tuple(self.tokenizer.encode(row.end, add_special_tokens=False))
        return ThinkingMarkers(begin, end, end_ids, symbols.of_token, repeats=bool(row.before_text))

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the begin marker of thoughts.

        If so, the answer begins within thoughts.
        """
        return self.thinking_markers is not None and self.thinking_markers.opened_by(prompt)

    def closed_by(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the end marker of thoughts, so that none follow."""
        return self.thinking_markers is not None and self.thinking_markers.closed_by(prompt)

    def begin_answer(self, prompt: Sequence[int], text: str, thoughts: str = "") -> list[int]:
        """Return the token ids of a prompt and of the beginning of its answer.

        Thoughts that the prompt has begun are closed. Names of special tokens in ``text`` and
        ``thoughts`` become ordinary tokens.

        Args:
            prompt: token ids of the conversation, with the header of an answer.
            text: beginning of the answer's text.
            thoughts: thoughts before the text; ignored if :meth:`takes_thoughts` is False.
        """
        opened = self.opened_by(prompt)
        thoughts = thoughts if self.takes_thoughts(prompt) else ""
        form = "{}{}"
        if self.reasoning is not None and self.reasoning.before_text:
            before_text = self.reasoning.before_text
            after_thoughts = f"{self.reasoning.end}{self.reasoning.after_end}"
            form = f"{{}}{before_text}{{}}"
            if thoughts:
                form = f"{self.reasoning.begin}{{}}{after_thoughts}{before_text}{{}}"
        elif self.reasoning is not None and (opened or thoughts):
            begin = "" if opened else f"{self.reasoning.begin}\n"
            line_end = "\n" if thoughts else ""
            form = f"{begin}{{}}{line_end}{self.reasoning.end}\n\n{{}}"
        return [*prompt, *self.tokenizer.encode_form(form, thoughts, text)]

    def takes_thoughts(self, prompt: Sequence[int]) -> bool:
        """Return whether thoughts may follow a prompt: the model thinks, and they are not over."""
        return self.reasoning is not None and not self.closed_by(prompt)

    def nearest_effort(self, effort: str) -> str:
        """Return the effort of thinking that the chat template follows instead of ``effort``.

        The result is ``on`` if the template can only switch thinking on or off.
        """
        source = self.tokenizer.chat_template or ""
        options = {"reasoning_effort": effort}
        if in_channels(source):
            options = nearest_effort(options)
        if effort != "none" and "reasoning_effort" not in source:
            return "on"
        return str(options["reasoning_effort"])

    def grammar(self, *, tools: bool) -> AnswerGrammar:
        """Return the builder of grammars that force answers of this format.

        If ``tools`` is True, the answers may have calls; then a PromptError is raised if the model
        has no known format of calls.
        """
        return AnswerGrammar(self.symbols, self._dialect() if tools else None, self.reasoning)

    def reader(
        self,
        schemas: Mapping[str, str],
        *,
        opened: bool,
        has_form: bool = False,
        begun: bool = False,
    ) -> AnswerReader:
        """Return a parser of one answer.

        Args:
            schemas: schema of the arguments, as JSON text, of each tool that the answer may call,
                by the tool's name.
            opened: whether the prompt ends with the begin marker of thoughts (:meth:`opened_by`).
            has_form: whether text has a required form, such as JSON. If so, only calls with markers
                are recognized.
            begun: whether the prompt ends with the beginning of the answer's text
                (:meth:`begin_answer`).
        """
        dialect = self._dialect() if schemas else None
        if has_form and dialect is not None:
            dialect = replace(dialect, allows_bare=False)
        return AnswerReader(
            self.symbols, dialect, self.reasoning, schemas, opened=opened, begun=begun
        )

    def _dialect(self) -> ToolDialect:
        if isinstance(self.dialect, str):
            raise PromptError(self.dialect)
        return self.dialect


class AnswerReader:
    """Streaming parser that splits one answer into thoughts, text and tool calls.

    Args:
        symbols: symbols of the model's tokens.
        dialect: format of calls; ``None`` for an answer without calls.
        reasoning: format of thoughts; ``None`` for an answer without thoughts.
        schemas: schema of the arguments, as JSON text, of each tool that the answer may call, by
            the tool's name; ``None``: the answer has no calls.
        opened: whether the prompt ends with the begin marker of thoughts.
        begun: whether the prompt ends with the beginning of the answer's text.
    """

    def __init__(
        self,
        symbols: TokenSymbols,
        dialect: ToolDialect | None,
        reasoning: ReasoningFormat | None,
        schemas: Mapping[str, str] | None = None,
        *,
        opened: bool = False,
        begun: bool = False,
    ) -> None:
        self._symbols = symbols
        schemas = schemas or {}
        in_channels = any(row is not None and row.before_text for row in (dialect, reasoning))
        self._channels = ChannelReader(symbols, schemas, begun=begun) if in_channels else None
        self._thoughts = ThoughtReader(reasoning, symbols, opened=opened)
        self._calls = None if dialect is None else CallReader(dialect, symbols, schemas)
        self._bare = (
            BareCallReader(schemas) if dialect is not None and dialect.allows_bare else None
        )

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

        ``text`` is the decoded text that becomes final with the token ``token``: empty for a
        special token, and for a token that completes no character.
        """
        symbols = text + self._symbols.of_special(token)
        if self._channels is not None:
            return _join(self._channels.push(symbols))
        return self._read_calls(self._thoughts.push(symbols))

    def flush(self) -> list[Part]:
        """End the answer, and return the parts that were withheld because they could still change.

        An incomplete call that follows a complete one is dropped.
        """
        if self._channels is not None:
            return _join(self._channels.flush())
        parts = self._read_calls(self._thoughts.flush())
        if self._calls is None:
            return parts
        if self._bare is not None:
            call = self._bare.flush()
            if call:
                return [*parts, *call]
            parts += self._calls.push(self._bare.held)
        return _join([*parts, *self._calls.flush()])

    def _read_calls(self, parts: Sequence[Thought | str]) -> list[Part]:
        """Split the texts among ``parts`` into text and tool calls; thoughts stay as they are."""
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
    """The tool calls that may be recognized in an answer.

    Attributes:
        schemas: schema of the arguments, as JSON text, of each tool that the answer may call, by
            the tool's name.
        has_form: whether the answer's text has a required form, such as JSON. If so, only calls
            with markers are recognized.
    """

    schemas: Mapping[str, str]
    has_form: bool = False


class RepeatedCalls:
    """Detector of repeated calls in a growing answer.

    Small models often repeat a call until the length limit ends the answer. Therefore an answer
    ends with the first call that equals an earlier one, or where call number ``MAX_CALLS`` + 1
    begins.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._calls = set[tuple[str, str]]()  # names and arguments of the complete calls
        self._name: str | None = None  # name of the tool in the call that is being read
        self._arguments = ""  # arguments of the call that is being read, so far

    def push(self, text: str, token: int) -> bool:
        """Read the next token; return whether it completes a repetition or begins a call too many.

        ``text`` is the decoded text that becomes final with the token.
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
            # itself. Arguments that equal the complete arguments of an earlier call are therefore
            # complete.
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
    """Join adjacent parts of one kind: texts, thoughts, or parts of one call; drop empty texts."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(last, str) and isinstance(part, str):
            joined[-1] = last + part
        elif isinstance(last, Thought) and isinstance(part, Thought):
            joined[-1] = Thought(last.text + part.text)
        elif isinstance(last, CallPart) and isinstance(part, CallPart) and _continues(part, last):
            joined[-1] = replace(last, arguments=last.arguments + part.arguments)
        elif part != "":
            joined.append(part)
    return joined


def _continues(part: CallPart, last: CallPart) -> bool:
    """Return whether ``part`` has further arguments of the call to which ``last`` belongs."""
    return (part.index, part.name) == (last.index, last.name)
