"""Requests of ``/v1/responses``.

The server stores no responses, so ``previous_response_id`` is not supported: a client sends the whole conversation,
with the items of earlier responses copied unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from pronk.server.protocol.chat import ChatTurn, TextPart
from pronk.server.protocol.conversation import ConversationRequest
from pronk.server.protocol.guides import NAME_PATTERN, TextFormat
from pronk.server.protocol.request import RequestBody, Text, TextRequest, check_max, unsupported
from pronk.server.protocol.responses_reply import ResponsesReply
from pronk.server.protocol.tools import MAX_TOOLS, Function, ToolUse, tool_call
from pronk.server.settings import RequestLimits
from pronk.tokenization.chat.messages import thinking_options

Status = Literal["in_progress", "completed", "incomplete"]


class InputItem(ChatTurn):
    """Message in ``input``, possibly copied unchanged from an earlier response."""

    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"]
    name: None = None


class CallItem(RequestBody):
    """Tool call of an earlier response."""

    type: Literal["function_call"]
    id: Text | None = None
    call_id: Text = Field(max_length=64)
    name: Text = Field(pattern=NAME_PATTERN)
    arguments: Text
    status: Status | None = None


class CallOutputItem(RequestBody):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    id: Text | None = None
    call_id: Text = Field(max_length=64)
    output: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    status: Status | None = None


class ThoughtText(RequestBody):
    """Text of thoughts."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ThoughtItem(RequestBody):
    """Thoughts of an earlier response."""

    noop_values: ClassVar = {"encrypted_content": [""]}

    type: Literal["reasoning"]
    id: Text | None = None
    summary: Annotated[list[ThoughtText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ThoughtText], Field(fail_fast=True)] | None = None
    status: Status | None = None


def _item_type(item: Any) -> str:
    """Return the type of an item; a message may leave it out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message")


Item = Annotated[
    Annotated[InputItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ThoughtItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class TextOptions(RequestBody):
    """Options of the answer's text."""

    noop_values: ClassVar = {"verbosity": ["medium"]}

    format: TextFormat | None = None


class ReasoningOptions(RequestBody):
    """Options of thoughts. Thoughts are returned as they are, so a ``summary`` is not made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesTool(Function):
    """Tool; functions are the only type."""

    type: Literal["function"]


class ResponsesToolChoice(RequestBody):
    """Function that the answer must call."""

    type: Literal["function"]
    name: Text


class ResponsesRequest(ConversationRequest):
    """Body of ``/v1/responses``."""

    noop_values: ClassVar = {
        **TextRequest.noop_values,
        "background": [False],
        "previous_response_id": [],
        "truncation": ["disabled"],
    }
    messages_field: ClassVar = "input"
    reply_type: ClassVar = ResponsesReply

    input: Text | Annotated[list[Item], Field(fail_fast=True)] = Field(min_length=1)
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    top_logprobs: int | None = Field(None, ge=0)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        check_max("n", self.n, 1)
        check_max("top_logprobs", self.top_logprobs, limits.logprobs)
        if self.leaps:
            raise unsupported("leaps", "expected no such field in /v1/responses, found true; use /v1/chat/completions")

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        return {} if self.text is None or self.text.format is None else self.text.format.guide_arguments()

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_output_tokens

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is None and "message.output_text.logprobs" not in (self.include or ()):
            return None
        return self.top_logprobs or 0

    def conversation(self) -> list[dict[str, Any]]:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, CallOutputItem):
                content = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            elif isinstance(item, InputItem) and item.role != "assistant":
                messages.append(item.to_template())
            else:
                _add_to_answer(messages, item)
        return messages

    def tool_use(self) -> ToolUse:
        choice, parallel = self.tool_choice, self.parallel_tool_calls is not False
        if isinstance(choice, ResponsesToolChoice):
            return ToolUse(self.tools or (), "required", choice.name, parallel, "parameters")
        return ToolUse(self.tools or (), choice or "auto", None, parallel, "parameters")

    def template_options(self) -> dict[str, Any]:
        return thinking_options(None if self.reasoning is None else self.reasoning.effort)

    def described(self) -> dict[str, Any]:
        """Return the options of the request as the response repeats them."""
        form = None if self.text is None else self.text.format
        described: dict[str, Any] = {"type": "text" if form is None else form.type}
        if form is not None and form.type == "json_schema":
            schema = {"name": form.name, "description": form.description, "schema": form.schema_}
            described |= {**schema, "strict": form.strict}
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": described},
            "tool_choice": choice.model_dump() if isinstance(choice, ResponsesToolChoice) else choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }


def _add_to_answer(messages: list[dict[str, Any]], item: InputItem | CallItem | ThoughtItem) -> None:
    """Add an item of an earlier response to its message, the last one; thoughts begin a message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, ThoughtItem):
        thoughts = "".join(part.text for part in item.content or item.summary or ())
        messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts, "thinking": thoughts})
    elif isinstance(item, CallItem):
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        last.setdefault("tool_calls", []).append(tool_call(item.call_id, item.name, item.arguments))
    elif last is not None and not last["content"] and "tool_calls" not in last:
        last["content"] = item.to_template()["content"]
    else:
        messages.append(item.to_template())
