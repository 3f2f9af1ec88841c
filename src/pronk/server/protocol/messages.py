"""Requests and replies of ``/v1/messages``, Anthropic's Messages API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from pronk.outputs import Completion, Piece
from pronk.server.protocol.answers import Block
from pronk.server.protocol.conversation import AnswerReply, ConversationRequest
from pronk.server.protocol.guides import NAME_PATTERN
from pronk.server.protocol.request import RequestBody, Text, TextRequest, Texts, check_max, refuse, unsupported, usage
from pronk.server.protocol.tools import MAX_TOOLS, Function, ToolUse, tool_call
from pronk.server.settings import RequestLimits
from pronk.tokenization.chat.messages import thinking_options


class CacheControl(RequestBody):
    """Marker of a prefix to cache; not used: with the prefix cache on, the server caches every prefix."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(RequestBody):
    """Base of objects that may have a marker of the prompt cache."""

    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    """Content block of text."""

    type: Literal["text"]
    text: Text
    citations: list[Any] | None = Field(None, max_length=0)


class ThinkingBlock(RequestBody):
    """Thoughts of an earlier answer; the signature is not checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(Cacheable):
    """Tool call of an earlier answer."""

    noop_values: ClassVar = {"caller": [{"type": "direct"}]}

    type: Literal["tool_use"]
    id: Text = Field(max_length=64)
    name: Text = Field(pattern=NAME_PATTERN)
    input: dict[str, Any]


class ToolResultBlock(Cacheable):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Text = Field(max_length=64)
    content: Text | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = Field(None, description="Not used: the result says what went wrong.")


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class MessagesTurn(RequestBody):
    """Message: a text or a list of blocks."""

    role: Literal["user", "assistant"]
    content: Text | Annotated[list[AnyBlock], Field(fail_fast=True)]

    def to_template(self) -> list[dict[str, Any]]:
        """Return the messages for chat templates; raise ``ApiError`` if a block does not fit the role."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        own = (TextBlock, ThinkingBlock, ToolUseBlock) if self.role == "assistant" else (TextBlock, ToolResultBlock)
        if foreign := [block.type for block in self.content if not isinstance(block, own)]:
            raise refuse(
                "messages", f"expected no block {foreign[0]!r} in a message of the role {self.role!r}, found one"
            )
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        if self.role == "user":
            results = [block for block in self.content if isinstance(block, ToolResultBlock)]
            messages = [{"role": "tool", "tool_call_id": r.tool_use_id, "content": _text(r.content)} for r in results]
            return [*messages, {"role": "user", "content": "\n".join(texts)}] if texts or not results else messages
        thoughts = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
        calls = [
            tool_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        more = {"reasoning_content": thoughts, "thinking": thoughts, "tool_calls": calls}
        return [{"role": "assistant", "content": "\n".join(texts), **{key: each for key, each in more.items() if each}}]


class MessagesTool(Cacheable):
    """Tool of the client; tools of Anthropic's servers are refused."""

    noop_values: ClassVar = {
        "defer_loading": [False],
        "allowed_callers": [["direct"]],
        "eager_input_streaming": [True, False],
    }

    type: Literal["custom"] | None = None
    name: Text = Field(pattern=NAME_PATTERN)
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Not used: the input always follows the schema.")


class MessagesToolChoice(RequestBody):
    """Calls that the answer may or must have."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(RequestBody):
    """Thinking: off, or on with or without a budget in tokens."""

    noop_values: ClassVar = {"display": ["summarized"]}

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=0, le=2**31)


class JsonFormat(RequestBody):
    """JSON schema that the text of the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    """Form of the answer and effort of thinking."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(RequestBody):
    """Description of the client; neither used nor stored."""

    user_id: Text | None = Field(None, max_length=512)


@dataclass
class MessagesReply(AnswerReply):
    """Builder of the replies of ``/v1/messages``, whole or as events."""

    def __post_init__(self) -> None:
        self._id = f"msg_{uuid4().hex}"
        (self._parser,) = self.parsers
        self._open: Block | None = None  # block that is not closed yet

    def start(self) -> list[dict[str, Any]]:
        """Return the event that opens the message."""
        usage = {"input_tokens": self.num_prompt, "output_tokens": 0}  # the last event has the final counts
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for block, content, _ in self._parser.parse(pieces):
            if block is not self._open:
                events += self._closed()
                self._open = block
                empty = _content(Block(block.kind, block.number, block.call))
                events.append({"type": "content_block_start", "index": block.number, "content_block": empty})
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
        return self._message([_content(block) for block in blocks], *self._stop(done[0]), self._usage(done))

    def _message(
        self, content: list[Any], stop_reason: str | None, stop_sequence: str | None, usage: dict[str, Any]
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
        """Return the reason for the end of the answer and the stop sequence, if one ended it."""
        if done.finish_reason == "length":
            return "max_tokens", None
        if isinstance(done.stop_reason, str):
            return "stop_sequence", done.stop_reason
        return "tool_use" if self._parser.ends_with_call(done) else "end_turn", None

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the token counts; ``input_tokens`` has no tokens that were read from the cache."""
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
        block, self._open = self._open, None
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
    """Return a block as the reply has it; the input of an incomplete call is empty."""
    if block.call is not None:
        arguments: Any = {}
        with suppress(ValueError):
            arguments = json.loads(block.content)
        return {"type": "tool_use", "id": block.call.ident, "name": block.call.name, "input": arguments}
    if block.kind == "thought":
        signature = _signature(block) if block.parts else ""
        return {"type": "thinking", "thinking": block.content, "signature": signature}
    return {"type": "text", "text": block.content}


def _signature(block: Block) -> str:
    """Return a digest of thoughts, which clients send back; the server does not check it."""
    return hashlib.sha256(block.content.encode()).hexdigest()


class CountTokensRequest(ConversationRequest):
    """Body of ``/v1/messages/count_tokens``."""

    noop_values: ClassVar = {
        **TextRequest.noop_values,
        "service_tier": ["auto", "standard_only"],
        "context_management": [{}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}],
        "mcp_servers": [[]],
        "inference_geo": ["global"],
        "speed": ["standard"],
    }

    messages: Annotated[list[MessagesTurn], Field(fail_fast=True)] = Field(min_length=1)
    system: Text | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    stop: Texts | None = Field(None, alias="stop_sequences")
    metadata: Metadata | None = None  # type: ignore[assignment]
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def check(self, limits: RequestLimits) -> None:
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise refuse("tool_choice", "expected a name with the type 'tool', and with no other")
        super().check(limits)
        check_max("n", self.n, 1)
        if self.leaps or self.stream_options:
            raise unsupported("leaps", "expected no such field in /v1/messages, found one; use /v1/chat/completions")
        if self.messages[-1].role != "user":
            expected = "expected a last message of the role 'user', found 'assistant'"
            raise unsupported("messages", f"{expected}; the beginning of an answer cannot be given, leave it out")

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        form = None if self.output_config is None else self.output_config.format
        return {} if form is None else {"output_config.format": {"json": form.schema_}}

    def conversation(self) -> list[dict[str, Any]]:
        system = _text(self.system)
        messages = [message for turn in self.messages for message in turn.to_template()]
        return [{"role": "system", "content": system}, *messages] if system else messages

    def tool_use(self) -> ToolUse:
        functions = [
            Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
            for tool in self.tools or ()
        ]
        choice = self.tool_choice or MessagesToolChoice(type="auto")
        kind: Literal["none", "auto", "required"] = choice.type if choice.type in ("auto", "none") else "required"
        return ToolUse(functions, kind, choice.name, not choice.disable_parallel_tool_use, "input_schema")

    def template_options(self) -> dict[str, Any]:
        """Return further variables for the chat template; as in Anthropic's API, thinking is off by default."""
        effort = None if self.output_config is None else self.output_config.effort
        return thinking_options(effort, self.thinking is not None and self.thinking.type != "disabled")

    def max_thought_tokens(self) -> int | None:
        return self.thinking_budget if self.thinking is None else self.thinking.budget_tokens


class MessagesRequest(CountTokensRequest):
    """Body of ``/v1/messages``."""

    reply_type: ClassVar = MessagesReply
    caps_max_tokens: ClassVar = True  # the field is required, and agents send one large number to all models

    max_tokens: int = Field(ge=1, le=2**31)

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens


def _text(content: str | Sequence[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())
