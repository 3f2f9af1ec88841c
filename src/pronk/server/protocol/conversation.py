"""Requests with a conversation as prompt, and an answer that may have thoughts and tool calls."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from pronk import GuideError, OptionError, Piece, PronkError
from pronk.server.errors import ApiError
from pronk.server.protocol.answers import AnswerParser, TokenTexts
from pronk.server.protocol.request import (
    EngineInputs,
    PreparedRequest,
    Reply,
    Text,
    TextRequest,
    by_sample,
    refuse,
    unsupported,
)
from pronk.server.protocol.thinking import (
    ReasoningOptions,
    Thinking,
    ThinkingBudget,
    ThinkingConfig,
    ThinkingHint,
    join_wishes,
    wishes_of,
)
from pronk.server.protocol.tools import ToolUse
from pronk.server.settings import RequestLimits
from pronk.text import AnswerCalls, AnswerFormat, ChatPrompt, join_parts

# Limits of the variables of chat templates that a request may set. Texts are short names, so that
# they cannot imitate another role.
_MAX_OPTIONS = 16
_OPTION_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_OPTION_TEXT = re.compile(r"[a-zA-Z0-9_.-]{0,64}")
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)


def _without_nothing(options: Any) -> Any:
    """Return a chat template's variables without ``None`` and empty lists and objects.

    A variable with such a value is the same as no variable.
    """
    if not isinstance(options, dict):
        return options
    return {name: value for name, value in options.items() if value not in (None, [], {})}


TemplateOptions = Annotated[dict[str, Any], BeforeValidator(_without_nothing)]


@dataclass
class AnswerReply:
    """Base of the builders of replies to conversations."""

    request: ConversationRequest
    shared_fields: Mapping[str, Any]  # fields that are equal in the reply and in every chunk
    texts: TokenTexts
    num_prompt: int  # number of tokens of the prompt
    has_blocks: bool  # whether the answer may have thoughts or calls besides text
    parsers: Sequence[AnswerParser]  # one per sample

    def record(self, pieces: Sequence[Piece]) -> None:
        """Parse the new tokens of a step.

        The text of the ``Completion`` is not enough, because it lacks the special tokens that begin
        calls.
        """
        for index, sample_pieces in by_sample(pieces):
            self.parsers[index].parse(sample_pieces)


class ConversationRequest(TextRequest):
    """Base of requests with a conversation."""

    # Name of the field with the conversation, for error messages.
    messages_field: ClassVar = "messages"
    # Class that builds the reply. Its constructor takes the fields of :class:`AnswerReply`.
    reply_type: ClassVar[Callable[..., Reply]]
    reasoning_effort: ThinkingHint | None = None
    enable_thinking: ThinkingHint | None = Field(
        None, description="Variable of chat templates that switches thinking."
    )
    think: ThinkingHint | None = Field(
        None, description="Switch or effort of thinking, as in Ollama's API."
    )
    thinking: ThinkingConfig | ThinkingHint | None = Field(
        None, description="As in Anthropic's API, or a switch."
    )
    reasoning: ReasoningOptions | ThinkingHint | None = Field(
        None, description="As in OpenRouter's API, or a switch."
    )
    thinking_budget: ThinkingBudget = None
    thinking_message: Annotated[Text, Field(max_length=1024)] | None = Field(
        None, description="Text that closes thoughts which have used up the budget."
    )
    chat_template_kwargs: TemplateOptions | None = Field(
        None, description="Variables of the chat template."
    )
    parallel_tool_calls: bool | None = None

    @abstractmethod
    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""

    def checked_conversation(self) -> list[dict[str, Any]]:
        """Return :meth:`conversation`; a tool's result without its call becomes a user's message.

        Agents shorten long conversations by leaving out tool calls, and may keep the results. A
        result without its call does not fit the templates, in which results follow calls.
        """
        messages = list[dict[str, Any]]()
        called = set[str]()
        for message in _with_ids(self.conversation()):
            called.update(call["id"] for call in message.get("tool_calls", ()))
            if message["role"] == "tool" and message["tool_call_id"] not in called:
                self.note_ignored(
                    [f"{self.messages_field} (a result as text: its call is missing)"]
                )
                content = f"Result of an earlier tool call:\n{join_parts(message)['content']}"
                messages.append({"role": "user", "content": content})
            else:
                messages.append(message)
        return messages

    @cached_property
    def tool_use(self) -> ToolUse:
        """Tools of the request and the calls that its answer may or must have."""
        return self.read_tools()

    @abstractmethod
    def read_tools(self) -> ToolUse:
        """Return the tools and the calls that the answer may have, for :attr:`tool_use`."""

    def default_thinking(self) -> Thinking:
        """Return the thinking options of a request that sets none of the fields for thinking."""
        return Thinking()

    def thinking_wishes(self) -> list[Thinking]:
        """Return the thinking options that each of the request's fields sets, one item per field.

        If several fields set an effort that the model cannot follow, the report of ignored fields
        names the first of them.
        """
        return [
            Thinking.of_hint("reasoning_effort", self.reasoning_effort),
            Thinking.of_hint("enable_thinking", self.enable_thinking),
            *wishes_of("reasoning", self.reasoning),
            *wishes_of("thinking", self.thinking),
            Thinking.of_hint("think", self.think),
            Thinking(budget=self.thinking_budget, field="thinking_budget"),
        ]

    def thinking_wish(self) -> Thinking:
        """Return the thinking options that all of the request's fields set together.

        Raises:
            ApiError: two fields contradict each other.
        """
        wish = join_wishes(self.thinking_wishes())
        return wish if wish.asks else self.default_thinking()

    @property
    def continues_answer(self) -> bool:
        """Whether the last message is the beginning of the answer, which the reply continues."""
        return False

    def check_begun(self, message: Mapping[str, Any]) -> None:
        """Check the message that the answer continues, in the form of chat templates.

        Raises:
            ApiError: the message has tool calls, or thoughts without a text after them.
        """
        if message.get("tool_calls"):
            problem = (
                "expected a last message without tool calls to continue, found one; leave them out"
            )
            raise unsupported(self.messages_field, problem)
        if message.get("reasoning_content") and not message["content"]:
            problem = (
                "expected a text after the thoughts of the last message to continue, found none; "
                "add its beginning, or leave the message out"
            )
            raise unsupported(self.messages_field, problem)

    def template_options(self) -> dict[str, Any]:
        """Return the request's variables of the chat template, those for thinking included."""
        return self.thinking_wish().template_options() | (self.chat_template_kwargs or {})

    def unfollowed(self, answers: AnswerFormat) -> Iterator[str]:
        """Yield the parts of the request that the answer may violate, to report them as ignored.

        These are fields for thinking that the model has no means for, and keywords of the tools'
        schemas that the grammar does not enforce.
        """
        yield from self.thinking_wish().report(answers)
        dialect = answers.dialect
        if self.tool_use.allowed_names and not isinstance(dialect, str):
            yield from self.tool_use.not_enforced(dialect.arguments)

    def num_logprobs(self) -> int | None:
        """Return the number of likeliest tokens to report; ``None``: no log-probabilities."""
        return None

    @property
    def requested_max_tokens(self) -> int | None:
        """Maximum number of tokens to generate, if the request sets one."""
        return None

    @property
    def limit_field(self) -> str:
        """Name of the field with the maximum number of tokens."""
        return "max_tokens"

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        options = self.chat_template_kwargs or {}
        check_template_options("chat_template_kwargs", options)
        join_wishes([*self.thinking_wishes(), *_wishes_of_template(options)])
        self.tool_use.check()

    def answer_calls(self) -> AnswerCalls | None:
        names = self.tool_use.allowed_names
        if not names or not self.tool_use.allows_multiple:
            return None
        return AnswerCalls(self.tool_use.schemas(), has_form=self.guide() is not None)

    def prepare(
        self,
        prompt: ChatPrompt,
        max_tokens: int,
        answers: AnswerFormat,
        shared_fields: Mapping[str, Any],
    ) -> PreparedRequest:
        """Return the engine's input and the builder of the reply.

        Args:
            prompt: token ids of the conversation, and its branch positions.
            max_tokens: maximum number of tokens of the answer.
            answers: format of the model's answers.
            shared_fields: fields that are equal in the reply and in every chunk.

        Raises:
            ApiError: a schema is invalid, or the schemas are too large.
        """
        use = self.tool_use
        ids = prompt.token_ids
        opened = answers.opened_by(ids)
        schemas = use.schemas()
        form = self.guide()
        thinking: Literal["open", "never", "optional"] = "optional"
        if opened:
            thinking = "open"
        elif (
            self.continues_answer
            or answers.closed_by(ids)
            or self.template_options().get("enable_thinking") is False
        ):
            thinking = "never"
        try:
            guide = answers.grammar(tools=bool(schemas)).guide(
                schemas,
                form=form,
                allow_text=use.allows_text,
                allow_multiple=use.allows_multiple,
                thinking=thinking,
                begun=self.continues_answer,
            )
        except OptionError as error:
            raise self.field_error(error) or error from error
        budget = None if answers.reasoning is None else self.thinking_wish().budget
        has_blocks = bool(schemas) or answers.reasoning is not None
        parsers = list[AnswerParser]()
        for _ in range(self.n or 1):
            reader = answers.reader(
                schemas, opened=opened, has_form=form is not None, begun=self.continues_answer
            )
            parser = AnswerParser(reader, allows_text=use.allows_text, text_only=not has_blocks)
            parsers.append(parser)
        params = self.params(
            max_tokens,
            logprobs=self.num_logprobs(),
            guide=guide,
            thinking_budget=budget,
            thinking_message=self.thinking_message or "",
        )
        texts = TokenTexts(answers.tokenizer)
        reply = self.reply_type(self, shared_fields, texts, len(ids), has_blocks, parsers)
        inputs = EngineInputs([ids], params, [prompt.branch_positions])
        return PreparedRequest(inputs, reply)

    def field_error(self, error: PronkError) -> ApiError | None:
        """Convert a ``GuideError`` to an ``ApiError`` that names the field with the invalid form.

        If the request has no such field, but tools, their schemas are too complex together, and the
        error names ``tools``. Returns ``None`` for other errors.
        """
        named = super().field_error(error)
        if named is None and isinstance(error, GuideError) and self.tool_use.allowed_names:
            # relax_tools() has removed what a grammar cannot enforce, so that no single schema is
            # at fault. The compiler's own message would quote the whole grammar.
            expected = "expected tools whose schemas can be followed together"
            found = "found too many or too complex ones; use fewer or simpler tools"
            return refuse("tools", f"{expected}, {found}")
        return named

    def check_tools(self, answers: AnswerFormat, *, allow_generic: bool) -> None:
        """Raise ``ApiError`` if the request has tools and the model cannot have any.

        Args:
            answers: format of the model's answers.
            allow_generic: whether tools may be described in the system message, if the chat
                template has none.
        """
        problem = answers.problem_with_tools(allow_generic=allow_generic)
        if self.tool_use.allowed_names and problem is not None:
            raise unsupported("tools", problem)


def _wishes_of_template(options: Mapping[str, Any]) -> list[Thinking]:
    """Return the thinking options that a request sets as variables of the chat template.

    Templates name the switch ``enable_thinking`` or ``thinking``.
    """
    wishes = list[Thinking]()
    effort = options.get("reasoning_effort")
    if isinstance(effort, str):
        wishes.append(Thinking.of_hint("chat_template_kwargs.reasoning_effort", effort))
    for name in ("enable_thinking", "thinking"):
        switch = options.get(name)
        if isinstance(switch, bool):
            field = "chat_template_kwargs.enable_thinking"
            wishes.append(Thinking(enabled=switch, field=field))
    return wishes


def _with_ids(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a conversation with an id in each tool call and result.

    A result without an id belongs to the first call without a result.
    """
    unanswered = list[str]()
    for number, message in enumerate(messages):
        for position, call in enumerate(message.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{number}_{position}"
            unanswered.append(call["id"])
        if message["role"] == "tool":
            ident = message.get("tool_call_id") or next(iter(unanswered), "")
            unanswered = [each for each in unanswered if each != ident]
            yield {**message, "tool_call_id": ident}
        else:
            yield message


def check_template_options(field: str, options: Mapping[str, Any]) -> None:
    """Raise ``ApiError`` if a request sets variables of the chat template that it must not set."""
    if len(options) > _MAX_OPTIONS:
        raise refuse(field, f"expected at most {_MAX_OPTIONS} names, found {len(options)}")
    for name, value in options.items():
        if _OPTION_NAME.fullmatch(name) is None or name in _RESERVED:
            expected = "expected names of template variables such as 'enable_thinking'"
            raise refuse(field, f"{expected}, found {name!r:.40}")
        is_name = isinstance(value, str) and _OPTION_TEXT.fullmatch(value) is not None
        if not is_name and not isinstance(value, (bool, int, float)):
            expected = "expected a boolean, a number or a name of up to 64 letters"
            raise refuse(field, f"{name}: {expected}, found another value")
