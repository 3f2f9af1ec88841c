"""Requests and replies of ``/v1/messages``, Anthropic's Messages API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field

from pronk import Completion, Piece
from pronk.server.protocol.answers import Block
from pronk.server.protocol.conversation import AnswerReply, ConversationRequest
from pronk.server.protocol.guides import NAME_PATTERN
from pronk.server.protocol.parts import (
    Content,
    ResultContent,
    TextPart,
    as_parts,
    result_texts,
    texts_of,
)
from pronk.server.protocol.request import (
    MaxTokens,
    Record,
    Skipped,
    StopTexts,
    Text,
    check_max,
    refuse,
    unsupported,
    usage,
)
from pronk.server.protocol.thinking import Thinking, ThinkingHint
from pronk.server.protocol.tools import (
    MAX_ID,
    MAX_TOOLS,
    Arguments,
    Function,
    Parameters,
    SchemaPath,
    ToolChoice,
    ToolUse,
    tool_call,
)
from pronk.server.protocol.unions import OneOf, as_typed, type_of
from pronk.server.settings import RequestLimits
from pronk.text import TOOL_NAME


class TextBlock(TextPart):
    """Content block of text."""

    type: Literal["text"] = "text"


class ThinkingBlock(Record):
    """Content block of thoughts of an earlier answer; the signature is not checked."""

    type: Literal["thinking"]
    thinking: Text = ""
    signature: Text | None = Field(None, description="Not checked.")


class ToolUseBlock(Record):
    """Content block of a tool call of an earlier answer."""

    type: Literal["tool_use"]
    # If a call has no id, a later result without an id is its result.
    id: Text = Field("", max_length=MAX_ID)
    name: Text = Field(max_length=256)
    input: Arguments = "{}"


class ToolResultBlock(Record):
    """Content block with the result of a tool call."""

    type: Literal["tool_result"]
    # A result without an id belongs to the first call that has no result yet.
    tool_use_id: Text = Field("", max_length=MAX_ID)
    content: ResultContent | None = None
    is_error: bool | None = Field(None, description="Not used: the result says what went wrong.")


class DocumentSource(Record):
    """Source of a document: its text; files are refused."""

    type: Literal["text"]
    data: Text


class DocumentBlock(Record):
    """Content block of a document with its text."""

    type: Literal["document"]
    source: DocumentSource
    title: Text | None = None


class SearchResultBlock(Record):
    """Content block with a result of the client's search."""

    type: Literal["search_result"]
    source: Text
    title: Text
    content: Content


# Blocks that the model cannot read, and without which the answer would be wrong.
_UNREADABLE_BLOCKS = frozenset({"image", "container_upload"})
_BLOCKS: Mapping[str, type[Record]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    # Parsed as text, so that the error says that a text is expected.
    **dict.fromkeys(_UNREADABLE_BLOCKS, TextBlock),
}


def _block_class(block: Mapping[str, Any]) -> type[Record]:
    """Return the class that parses a content block.

    Blocks of unknown types belong to tools of Anthropic's servers; their class is ``Skipped``.
    """
    kind = type_of(block) or ("text" if "text" in block else "")
    return _BLOCKS.get(kind, Skipped)


AnyBlock = Annotated[
    TextBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | DocumentBlock
    | SearchResultBlock
    | Skipped,
    OneOf(_block_class),
]
# Content of a message: a text or blocks.
Blocks = Annotated[
    Text | Annotated[list[AnyBlock], Field(fail_fast=True)], BeforeValidator(as_parts)
]
SystemText = Annotated[
    Text | Annotated[list[TextBlock], Field(fail_fast=True)], BeforeValidator(as_parts)
]
# Classes of the blocks that a message may have, by its role.
_BLOCKS_OF: Mapping[str, tuple[type[Record], ...]] = {
    "user": (TextBlock, ToolResultBlock, DocumentBlock, SearchResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class MessagesTurn(Record):
    """Message of ``/v1/messages``: a text or a list of blocks.

    A system message may stand anywhere in the conversation.
    """

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @classmethod
    def adapt(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Set the content of an assistant's message to ``""`` if it is missing or null."""
        is_empty = value.get("role") == "assistant" and value.get("content") is None
        return {**value, "content": ""} if is_empty else value

    def to_template(self) -> list[dict[str, Any]]:
        """Return the message as messages for chat templates.

        A user's message becomes one message per tool result, followed by one with the text.

        Raises:
            ApiError: a block does not fit the role.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = [block for block in self.content if not isinstance(block, Skipped)]
        for block in blocks:
            if not isinstance(block, _BLOCKS_OF[self.role]):
                kind = block.type
                expected = f"expected no block {kind!r} in a message of the role {self.role!r}"
                raise refuse("messages", f"{expected}, found one")
        text = "\n".join(_block_text(block) for block in blocks if not isinstance(block, _NO_TEXT))
        if self.role == "user":
            results = [block for block in blocks if isinstance(block, ToolResultBlock)]
            messages = [_result_message(block) for block in results]
            has_text = len(results) < len(blocks) or not results
            return [*messages, {"role": "user", "content": text}] if has_text else messages
        if self.role == "system":
            return [{"role": "system", "content": text}] if text else []
        thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
        calls = [tool_call(block.id, block.name, block.input) for block in uses]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts:  # chat templates read thoughts under one of these two names
            message["reasoning_content"] = thoughts
            message["thinking"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return [message]


_NO_TEXT = (ThinkingBlock, ToolUseBlock, ToolResultBlock)


def _block_text(block: Record) -> str:
    """Return the text of a content block for the model."""
    match block:
        case TextBlock():
            return block.text
        case DocumentBlock():
            return f"{block.title}\n\n{block.source.data}" if block.title else block.source.data
        case SearchResultBlock():
            return "\n".join([f"{block.title} ({block.source})", *texts_of(block.content)])
    msg = f"expected a block with a text, found {type(block).__name__}"
    raise AssertionError(msg)


def _result_message(block: ToolResultBlock) -> dict[str, Any]:
    content = "\n".join(result_texts(block.content or ""))
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


class MessagesTool(Record):
    """Tool of the client; tools of Anthropic's servers have other types, and are skipped."""

    type: Literal["custom"] | None = None
    name: Text = Field(pattern=NAME_PATTERN)
    description: Text | None = None
    input_schema: Parameters
    strict: bool | None = Field(None, description="Not used: the input always follows the schema.")

    def to_function(self) -> Function:
        """Return the tool as a function in the form of OpenAI's API."""
        return Function(name=self.name, description=self.description, parameters=self.input_schema)


def _messages_tool_class(tool: Mapping[str, Any]) -> type[Record]:
    name = tool.get("name")
    is_usable = not isinstance(name, str) or TOOL_NAME.fullmatch(name) is not None
    is_custom = (type_of(tool) or "custom") == "custom"
    return MessagesTool if is_custom and is_usable else Skipped


AnyMessagesTool = Annotated[MessagesTool | Skipped, OneOf(_messages_tool_class)]


class MessagesToolChoice(ToolChoice):
    """Field ``tool_choice``: the calls that the answer may or must have."""

    type: Literal["auto", "any", "tool", "none"]


class JsonFormat(Record):
    """Field ``format``: a JSON schema that the text of the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Record):
    """Field ``output_config``: the form of the answer and the effort of thinking."""

    format: JsonFormat | None = None
    effort: ThinkingHint | None = None


@dataclass
class MessagesReply(AnswerReply):
    """Builder of the reply to a request of ``/v1/messages``, whole or as events."""

    def __post_init__(self) -> None:
        self._id = f"msg_{uuid4().hex}"
        (self._parser,) = self.parsers
        self._open: Block | None = None  # block that is not closed yet

    def start(self) -> list[dict[str, Any]]:
        """Return the event that opens the message, with provisional token counts.

        The final counts are in the event ``message_delta``.
        """
        usage = {"input_tokens": self.num_prompt, "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for block, content, _ in self._parser.parse(pieces):
            if block is not self._open:
                events += self._closed()
                self._open = block
                empty = _content(Block(block.kind, block.number, block.call))
                events.append(
                    {"type": "content_block_start", "index": block.number, "content_block": empty}
                )
            if content:
                events.append(_delta(block, _DELTAS[block.kind], content))
        return events

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the events that close the last block and the message."""
        reason, sequence = self._stop(done[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            *self._closed(),
            {"type": "message_delta", "delta": delta, "usage": self._usage(done)},
            {"type": "message_stop"},
        ]

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        blocks = [block for block in self._parser.blocks if block.content or block.kind == "call"]
        content = [_content(block) for block in blocks]
        reason, sequence = self._stop(done[0])
        return self._message(content, reason, sequence, self._usage(done))

    def _message(
        self,
        content: list[Any],
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.shared_fields["model"],
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def _stop(self, done: Completion) -> tuple[str, str | None]:
        """Return the reason why the answer ended, and the stop sequence or ``None``."""
        if done.finish_reason == "length":
            return "max_tokens", None
        if isinstance(done.stop_reason, str):
            return "stop_sequence", done.stop_reason
        return "tool_use" if self._parser.ends_with_call(done) else "end_turn", None

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the token counts; ``input_tokens`` leaves out the tokens in the prefix cache."""
        counts = usage(done, 1, self._parser.num_thought_tokens)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._parser.num_thought_tokens},
        }

    def _closed(self) -> Iterator[dict[str, Any]]:
        block = self._open
        self._open = None
        if block is None:
            return
        if block.kind == "thought":
            yield _delta(block, ("signature_delta", "signature"), _signature(block))
        yield {"type": "content_block_stop", "index": block.number}


_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _delta(block: Block, kind: tuple[str, str], content: str) -> dict[str, Any]:
    delta = {"type": kind[0], kind[1]: content}
    return {"type": "content_block_delta", "index": block.number, "delta": delta}


def _content(block: Block) -> dict[str, Any]:
    """Return a block of the answer in the form of the reply.

    The input of an incomplete call is empty.
    """
    if block.call is not None:
        arguments: Any = {}
        with suppress(ValueError):
            arguments = json.loads(block.content)
        return {
            "type": "tool_use",
            "id": block.call.ident,
            "name": block.call.name,
            "input": arguments,
        }
    if block.kind == "thought":
        signature = _signature(block) if block.parts else ""
        return {"type": "thinking", "thinking": block.content, "signature": signature}
    return {"type": "text", "text": block.content}


def _signature(block: Block) -> str:
    """Return a digest of thoughts as their signature, which Anthropic's API has.

    Clients send the signature back with the thoughts; the server does not check it.
    """
    return hashlib.sha256(block.content.encode()).hexdigest()


class CountTokensRequest(ConversationRequest):
    """Body of ``/v1/messages/count_tokens``."""

    places: ClassVar[Sequence[str]] = ("text", "messages")

    messages: Annotated[list[MessagesTurn], Field(fail_fast=True)] = Field(min_length=1)
    system: SystemText | None = None
    stop: StopTexts | None = Field(None, alias="stop_sequences")
    tools: Annotated[list[AnyMessagesTool], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS
    )
    tool_choice: Annotated[MessagesToolChoice, BeforeValidator(as_typed)] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(
        None, description="Former name of output_config.format."
    )
    max_tokens: MaxTokens | None = None

    def check(self, limits: RequestLimits) -> None:
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise refuse("tool_choice", "expected a name with the type 'tool', and with no other")
        super().check(limits)
        check_max("n", self.n, 1)
        if self.leaps:
            problem = "expected no such field in /v1/messages, found one; use /v1/chat/completions"
            raise unsupported("leaps", problem)

    @property
    def continues_answer(self) -> bool:
        """Whether the last message is a text of the assistant, which the answer continues."""
        last = self.messages[-1]
        if last.role != "assistant" or not last.content:
            return False
        return isinstance(last.content, str) or isinstance(last.content[-1], TextBlock)

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        config = None if self.output_config is None else self.output_config.format
        formats = {"output_config.format": config, "output_format": self.output_format}
        return {name: {"json": form.schema_} for name, form in formats.items() if form is not None}

    def conversation(self) -> list[dict[str, Any]]:
        messages = list[dict[str, Any]]()
        system = self.system
        if not isinstance(system, str):
            system = "\n".join(block.text for block in system or ())
        if system:
            messages.append({"role": "system", "content": system})
        for turn in self.messages:
            messages += turn.to_template()
        return messages

    def read_tools(self) -> ToolUse:
        offered = list[tuple[SchemaPath, Function]]()
        for number, tool in enumerate(self.tools or ()):
            if isinstance(tool, MessagesTool):
                offered.append((("tools", number, "input_schema"), tool.to_function()))
        skipped = [tool for tool in self.tools or () if isinstance(tool, Skipped)]
        return ToolUse.of(
            offered, self.tool_choice, parallel=self.parallel_tool_calls, skipped=skipped
        )

    def default_thinking(self) -> Thinking:
        """Return no thinking: in Anthropic's API, thinking is off by default."""
        return Thinking(enabled=False)

    def thinking_wish(self) -> Thinking:
        """Return the thinking options that all of the request's fields set together.

        In Anthropic's API, ``output_config.effort`` is also about answers without thoughts, so that
        it counts only if thinking is on.
        """
        wish = super().thinking_wish()
        hint = None if self.output_config is None else self.output_config.effort
        effort = Thinking.of_hint("output_config.effort", hint)
        if not wish.enabled or wish.effort is not None or effort.effort is None:
            return wish
        return replace(effort, enabled=True, budget=wish.budget)


class MessagesRequest(CountTokensRequest):
    """Body of ``/v1/messages``."""

    reply_type: ClassVar = MessagesReply

    max_tokens: MaxTokens
