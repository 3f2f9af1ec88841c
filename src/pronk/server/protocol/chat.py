"""Bodies of ``/v1/chat/completions``, which renders conversations with the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field, model_validator

from pronk.outputs import Completion, Piece
from pronk.server.protocol.answers import AnswerParser, Delta, chat_logprobs
from pronk.server.protocol.conversation import AnswerReply, ConversationRequest, check_template_options
from pronk.server.protocol.guides import GuidedRequest
from pronk.server.protocol.request import RequestBody, Text, by_sample, check_max, leaps, refuse, usage
from pronk.server.protocol.tools import MAX_TOOLS, FunctionChoice, FunctionTool, ToolCall, ToolUse, tool_call
from pronk.server.settings import RequestLimits
from pronk.tokenization.chat.messages import thinking_options

_MAX_CALLS = 128  # maximum number of tool calls in one message, as in the OpenAI API


class TextPart(RequestBody):
    """Text part of a message; other types of parts are refused."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, description="Of an earlier answer; not used.")


class ChatTurn(RequestBody):
    """Base of messages: role and content."""

    role: str
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]

    def to_template(self) -> dict[str, Any]:
        """Return the message as a dict for chat templates; the role ``developer`` becomes ``system``."""
        parts = self.content
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": [{"type": "text", "text": part.text} for part in parts] if isinstance(parts, list) else parts,
        }


class ChatMessage(ChatTurn):
    """Message of ``/v1/chat/completions``; answers may be sent back as they are, empty fields included."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Text | None = Field(None, max_length=64)
    refusal: None = None
    audio: None = None
    function_call: None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = Field(None, max_length=_MAX_CALLS)
    tool_call_id: Text | None = Field(None, max_length=64)
    annotations: list[Any] | None = Field(None, max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _check_calls(cls, value: Any) -> Any:
        """Check that tool fields fit the role; set missing content to ``""`` if there are calls or thoughts."""
        if not isinstance(value, dict):
            return value
        calls, role = value.get("tool_calls"), value.get("role")
        if calls and role != "assistant":
            raise refuse("messages", f"expected tool_calls with the role 'assistant' only, found the role {role!r}")
        if (role == "tool") != (value.get("tool_call_id") is not None):
            raise refuse("messages", "expected a tool_call_id with the role 'tool', and with no other")
        has_more = calls or (role == "assistant" and value.get("reasoning_content") is not None)
        return {**value, "content": ""} if has_more and value.get("content") is None else value

    def to_template(self) -> dict[str, Any]:
        """Return the message as a dict for chat templates, tool calls and thoughts included."""
        calls = [call.model_dump(include={"id", "type", "function"}) for call in self.tool_calls or ()]
        more = {"name": self.name, "tool_calls": calls or None, "tool_call_id": self.tool_call_id}
        # Templates read earlier thoughts under one of two names; most drop them before the last user message.
        more |= {"reasoning_content": self.reasoning_content, "thinking": self.reasoning_content}
        return {**super().to_template(), **{name: value for name, value in more.items() if value is not None}}


@dataclass
class ChatReply(AnswerReply):
    """Builder of the replies of ``/v1/chat/completions``."""

    request: ChatRequest

    def __post_init__(self) -> None:
        head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), **self.shared_fields}
        self._reply_head = {**head, "object": "chat.completion"}
        self._chunk_head = {**head, "object": "chat.completion.chunk"}
        if self.request.include_usage:
            self._chunk_head["usage"] = None

    def start(self) -> list[dict[str, Any]]:
        """Return one chunk per sample with the role; the content is null if thoughts or calls may come."""
        delta = {"role": "assistant", "content": None if self.has_blocks else ""}
        return [self._chunk(index, delta) for index in range(len(self.parsers))]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return chunks for each sample with new tokens, and a last chunk for each sample that ends."""
        chunks = []
        for index, sample_pieces in by_sample(pieces):
            chunks += self._chunks(index, sample_pieces)
            if (done := sample_pieces[-1].completion) is not None:
                last = self._chunk(index, {})
                last["choices"][0] |= {"finish_reason": self._reason(index, done), "stop_reason": done.stop_reason}
                chunks.append(last)
        return chunks

    def _chunks(self, index: int, sample_pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return one chunk per delta; the first has all logprobs of ``sample_pieces``."""
        deltas = [_delta(delta) for delta in self.parsers[index].parse(sample_pieces)]
        if not deltas and (self.request.logprobs or self.request.leaps or not self.has_blocks):
            # Tokens without text also need a chunk for their log-probabilities.
            deltas = [{}] if self.has_blocks else [{"content": ""}]
        chunks = [self._chunk(index, delta) for delta in deltas]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs([piece.logprobs or {} for piece in sample_pieces])
            if self.request.leaps:
                chunks[0]["choices"][0]["leaps"] = leaps(sample_pieces)
        return chunks

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return a chunk with the token counts, if requested."""
        return [{**self._chunk_head, "choices": [], "usage": self._usage(done)}] if self.request.include_usage else []

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(parser),
                "logprobs": self._logprobs(completion.logprobs or []),
                "finish_reason": self._reason(index, completion),
                "stop_reason": completion.stop_reason,
                "seed": completion.seed,
            }
            for index, (completion, parser) in enumerate(zip(done, self.parsers, strict=True))
        ]
        return {**self._reply_head, "choices": choices, "usage": self._usage(done)}

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        return usage(done, len(self.parsers), sum(parser.num_thought_tokens for parser in self.parsers))

    def _reason(self, index: int, done: Completion) -> str:
        return "tool_calls" if self.parsers[index].ends_with_call(done) else done.finish_reason

    def _logprobs(self, reports: Sequence[dict[int, float]]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(self.texts, reports, self.request.top_logprobs or 0)

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._chunk_head, "choices": [choice]}


def _message(parser: AnswerParser) -> dict[str, Any]:
    content, thoughts = parser.content("text"), parser.content("thought")
    calls = [tool_call(block.call.ident, block.call.name, block.content) for block in parser.blocks if block.call]
    message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    more = {"reasoning_content": thoughts, "tool_calls": calls}
    return message | {name: value for name, value in more.items() if value}


def _delta(delta: Delta) -> dict[str, Any]:
    block, content = delta.block, delta.content
    if block.call is None:
        return {"content" if block.kind == "text" else "reasoning_content": content}
    if delta.is_first:
        return {"tool_calls": [{"index": block.call.index, **tool_call(block.call.ident, block.call.name, content)}]}
    return {"tool_calls": [{"index": block.call.index, "function": {"arguments": content}}]}


class ChatRequest(GuidedRequest, ConversationRequest):
    """Body of ``/v1/chat/completions``."""

    noop_values: ClassVar = {
        **GuidedRequest.noop_values,
        "functions": [[]],
        "function_call": ["none", "auto"],
        "modalities": [["text"]],
        "verbosity": ["medium"],
    }
    reply_type: ClassVar = ChatReply

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        check_template_options("chat_template_kwargs", self.chat_template_kwargs or {})
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs", "expected logprobs: true, found none; add it, or leave top_logprobs out")
        check_max("top_logprobs", self.top_logprobs, limits.logprobs)
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refuse("max_tokens", "expected max_completion_tokens of the same value, found another; leave one out")

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def conversation(self) -> list[dict[str, Any]]:
        return [message.to_template() for message in self.messages]

    def tool_use(self) -> ToolUse:
        functions, parallel = [tool.function for tool in self.tools or ()], self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, FunctionChoice):
            return ToolUse(functions, "required", self.tool_choice.function.name, parallel)
        return ToolUse(functions, self.tool_choice or "auto", None, parallel)

    def template_options(self) -> dict[str, Any]:
        return thinking_options(self.reasoning_effort, self.enable_thinking) | (self.chat_template_kwargs or {})

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
