"""Requests of ``/v1/messages``, Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pronk.server.protocol.conversation import AnswerBuilder, ConversationRequest
from pronk.server.protocol.guides import NAME_PATTERN
from pronk.server.protocol.messages_reply import MessagesReply
from pronk.server.protocol.request import RequestBody, Text, TextRequest, Texts, check_max, refuse, unsupported
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
        own: tuple[type[RequestBody], ...] = (TextBlock, ToolResultBlock)
        if self.role == "assistant":
            own = (TextBlock, ThinkingBlock, ToolUseBlock)
        if foreign := [block.type for block in self.content if not isinstance(block, own)]:
            raise refuse(
                "messages", f"expected no block {foreign[0]!r} in a message of the role {self.role!r}, found one"
            )
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        if self.role == "user":
            results = [block for block in self.content if isinstance(block, ToolResultBlock)]
            messages = [{"role": "tool", "tool_call_id": each.tool_use_id, "content": _text(each)} for each in results]
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
        system = self.system if isinstance(self.system, str) else "\n".join(block.text for block in self.system or ())
        messages = [message for turn in self.messages for message in turn.to_template()]
        return [{"role": "system", "content": system}, *messages] if system else messages

    def tool_use(self) -> ToolUse:
        functions = [
            Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
            for tool in self.tools or ()
        ]
        choice = self.tool_choice or MessagesToolChoice(type="auto")
        kind: Literal["none", "auto", "required"] = "required"
        if choice.type in ("auto", "none"):
            kind = choice.type
        return ToolUse(functions, kind, choice.name, not choice.disable_parallel_tool_use, "input_schema")

    def template_options(self) -> dict[str, Any]:
        """Return further variables for the chat template; as in Anthropic's API, thinking is off by default."""
        effort = None if self.output_config is None else self.output_config.effort
        return thinking_options(effort, self.thinking is not None and self.thinking.type != "disabled")

    def max_thought_tokens(self) -> int | None:
        return self.thinking_budget if self.thinking is None else self.thinking.budget_tokens

    def reply(self, builder: AnswerBuilder) -> MessagesReply:
        return MessagesReply(builder)


class MessagesRequest(CountTokensRequest):
    """Body of ``/v1/messages``."""

    caps_max_tokens: ClassVar = True  # the field is required, and agents send one large number to all models

    max_tokens: int = Field(ge=1, le=2**31)

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens


def _text(result: ToolResultBlock) -> str:
    content = result.content
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())
