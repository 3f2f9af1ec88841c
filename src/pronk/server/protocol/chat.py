"""Requests and replies of ``/v1/chat/completions``: conversations in the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from pronk import Completion, Piece
from pronk.server.protocol.answers import AnswerParser, Delta, chat_logprobs
from pronk.server.protocol.conversation import AnswerReply, ConversationRequest
from pronk.server.protocol.guides import GuidedRequest
from pronk.server.protocol.parts import Content, as_result, texts_of
from pronk.server.protocol.prediction import PredictedRequest
from pronk.server.protocol.request import (
    NO_LIMIT,
    MaxTokens,
    Record,
    Reply,
    Skipped,
    Text,
    by_sample,
    check_max,
    leaps,
    refuse,
    unsupported,
    usage,
)
from pronk.server.protocol.tools import (
    MAX_ID,
    MAX_TOOLS,
    AnyTool,
    AnyToolCall,
    Choice,
    Function,
    FunctionTool,
    SchemaPath,
    SkippedCall,
    ToolCall,
    ToolUse,
    tool_call,
)
from pronk.server.settings import RequestLimits

_MAX_CALLS = 128  # maximum number of tool calls in one message, as in the OpenAI API


class ChatTurn(Record):
    """Base of the messages of a conversation: role and content."""

    places: ClassVar[Sequence[str]] = ("message",)

    role: str
    content: Content

    def to_template(self) -> dict[str, Any]:
        """Return the message as a dict for chat templates; the role ``developer`` is ``system``."""
        content: Any = self.content
        if not isinstance(content, str):
            content = [{"type": "text", "text": text} for text in texts_of(content)]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class ChatMessage(ChatTurn):
    """Message of ``/v1/chat/completions``.

    Clients may send the message of a reply back unchanged, empty fields included.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Text | None = Field(None, max_length=256)
    refusal: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[AnyToolCall], Field(fail_fast=True)] | None = Field(
        None, max_length=_MAX_CALLS
    )
    tool_call_id: Text | None = Field(None, max_length=MAX_ID)
    prefix: bool | None = Field(
        None, description="The last message is the beginning of the answer."
    )

    @classmethod
    def adapt(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Check that tool fields fit the role; set the missing content of an assistant's message.

        OpenAI's former API of functions is converted: an assistant's message has one
        ``function_call``, and the message with its result has the role ``function``.
        """
        if value.get("role") == "function":
            value = {**value, "role": "tool"}
        if value.get("function_call") and not value.get("tool_calls"):
            others = {name: each for name, each in value.items() if name != "function_call"}
            value = {**others, "tool_calls": [{"function": value["function_call"]}]}
        calls = value.get("tool_calls")
        role = value.get("role")
        if calls and role != "assistant":
            problem = f"expected tool_calls with the role 'assistant' only, found the role {role!r}"
            raise refuse("messages", problem)
        if role != "tool" and value.get("tool_call_id"):
            problem = "expected a tool_call_id with the role 'tool', and with no other"
            raise refuse("messages", problem)
        if role in ("assistant", "tool") and value.get("content") is None:
            return {**value, "content": value.get("refusal") or ""}
        if role == "tool":
            return {**value, "content": as_result(value["content"])}
        return value

    @property
    def skipped_calls(self) -> Sequence[str]:
        """Ids of the message's tool calls whose tools the server ignores, such as a web search."""
        return [call.id for call in self.tool_calls or () if isinstance(call, SkippedCall)]

    def to_template(self) -> dict[str, Any]:
        """Return the message as a dict for chat templates, tool calls and thoughts included."""
        functions = [call for call in self.tool_calls or () if isinstance(call, ToolCall)]
        calls = [call.model_dump(include={"id", "type", "function"}) for call in functions]
        optional = {
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            # Templates read earlier thoughts under one of two names. Most templates leave out the
            # thoughts before the last user message.
            "reasoning_content": self.reasoning_content,
            "thinking": self.reasoning_content,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        return {**super().to_template(), **given}


@dataclass
class ChatReply(AnswerReply):
    """Builder of the reply to a request of ``/v1/chat/completions``, whole or in chunks."""

    request: ChatRequest

    def __post_init__(self) -> None:
        head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), **self.shared_fields}
        self._reply_head = {**head, "object": "chat.completion"}
        self._chunk_head = {**head, "object": "chat.completion.chunk"}
        if self.request.include_usage:
            self._chunk_head["usage"] = None

    def start(self) -> list[dict[str, Any]]:
        """Return one chunk per sample, with the role and an empty content.

        The content is null if the answer may have thoughts or calls.
        """
        delta = {"role": "assistant", "content": None if self.has_blocks else ""}
        return [self._chunk(index, delta) for index in range(len(self.parsers))]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the chunks of a step: new content of samples, and the end of finished samples."""
        chunks = []
        for index, sample_pieces in by_sample(pieces):
            chunks += self._chunks(index, sample_pieces)
            if (done := sample_pieces[-1].completion) is not None:
                last = self._chunk(index, {})
                last["choices"][0] |= {
                    "finish_reason": self._reason(index, done),
                    "stop_reason": done.stop_reason,
                }
                chunks.append(last)
        return chunks

    def _chunks(self, index: int, sample_pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the chunks for a sample's new tokens: one for each delta that they cause.

        The first chunk has the log-probabilities of all the new tokens.
        """
        deltas = [_delta(delta) for delta in self.parsers[index].parse(sample_pieces)]
        if not deltas and (self.request.logprobs or self.request.leaps or not self.has_blocks):
            # Tokens without text also need a chunk for their log-probabilities.
            deltas = [{}] if self.has_blocks else [{"content": ""}]
        chunks = [self._chunk(index, delta) for delta in deltas]
        if chunks:
            first = chunks[0]["choices"][0]
            first["logprobs"] = self._logprobs([piece.logprobs or {} for piece in sample_pieces])
            if self.request.leaps:
                first["leaps"] = leaps(sample_pieces)
        return chunks

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return a chunk with the token counts, if requested."""
        if not self.request.include_usage:
            return []
        return [{**self._chunk_head, "choices": [], "usage": self._usage(done)}]

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        choices = list[dict[str, Any]]()
        for index, completion in enumerate(done):
            choice = {
                "index": index,
                "message": _message(self.parsers[index]),
                "logprobs": self._logprobs(completion.logprobs or []),
                "finish_reason": self._reason(index, completion),
                "stop_reason": completion.stop_reason,
                "seed": completion.seed,
            }
            choices.append(choice)
        return {**self._reply_head, "choices": choices, "usage": self._usage(done)}

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        num_thought_tokens = sum(parser.num_thought_tokens for parser in self.parsers)
        return usage(done, len(self.parsers), num_thought_tokens)

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
    content = parser.content("text")
    thoughts = parser.content("thought")
    calls = list[dict[str, Any]]()
    for block in parser.blocks:
        if block.call is not None:
            calls.append(tool_call(block.call.ident, block.call.name, block.content))
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls and not content:
        message["content"] = None
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _delta(delta: Delta) -> dict[str, Any]:
    block = delta.block
    content = delta.content
    if block.call is None:
        return {"content" if block.kind == "text" else "reasoning_content": content}
    call: dict[str, Any] = {"function": {"arguments": content}}
    if delta.is_first:
        call = tool_call(block.call.ident, block.call.name, content)
    return {"tool_calls": [{"index": block.call.index, **call}]}


class ChatRequest(PredictedRequest, GuidedRequest, ConversationRequest):
    """Body of ``/v1/chat/completions``."""

    places: ClassVar[Sequence[str]] = ("text", "chat")
    reply_type: ClassVar[Callable[..., Reply]] = ChatReply

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Annotated[list[AnyTool], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS
    )
    tool_choice: Choice | None = None
    continue_final_message: bool | None = Field(
        None, description="The last message is the beginning of the answer."
    )
    add_generation_prompt: bool | None = Field(None, description="Not with continue_final_message.")

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if self.top_logprobs and not self.logprobs:
            problem = "expected logprobs: true, found none; add it, or leave top_logprobs out"
            raise refuse("top_logprobs", problem)
        check_max("top_logprobs", self.top_logprobs, limits.logprobs)
        token_limits = self._token_limits()
        if len({*token_limits.values()}) > 1:
            found = " and ".join(f"{name}: {limit}" for name, limit in token_limits.items())
            problem = f"expected the value of max_tokens, found {found}; leave one out"
            raise refuse("max_completion_tokens", problem)
        self.check_beginning()

    def check_beginning(self) -> None:
        """Check what the generated text is: a new answer, or the rest of the last message.

        Raises ``ApiError`` if the request wants neither, or if the message to continue is not the
        assistant's.
        """
        if self.add_generation_prompt is False and not self.continues_answer:
            problem = "expected true, found false; add continue_final_message: true"
            raise unsupported("add_generation_prompt", problem)
        role = self.messages[-1].role
        if self.continues_answer and role != "assistant":
            problem = "expected a last message of the role 'assistant' to continue"
            raise refuse("messages", f"{problem}, found {role!r}")

    @property
    def continues_answer(self) -> bool:
        return bool(self.continue_final_message or self.messages[-1].prefix)

    def _token_limits(self) -> dict[str, int]:
        """Return the values of ``max_tokens`` and ``max_completion_tokens``, if they set a limit.

        The keys are the names that the client wrote, such as ``n_predict`` for ``max_tokens``.
        """
        limits = dict[str, int]()
        for name in ("max_tokens", "max_completion_tokens"):
            limit = getattr(self, name)
            if limit not in (None, NO_LIMIT):
                limits[self.written(name)] = limit
        return limits

    @property
    def limit_field(self) -> str:
        return next(iter(self._token_limits()), "max_tokens")

    @property
    def requested_max_tokens(self) -> int | None:
        limits = [*self._token_limits().values()]
        return limits[0] if limits else self.max_tokens or self.max_completion_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template, without results of tools that are ignored."""
        skipped = {ident for message in self.messages for ident in message.skipped_calls}
        messages = list[dict[str, Any]]()
        for message in self.messages:
            is_skipped = message.role == "tool" and message.tool_call_id in skipped
            if not is_skipped:
                messages.append(message.to_template())
        return messages

    def read_tools(self) -> ToolUse:
        offered = list[tuple[SchemaPath, Function]]()
        for number, tool in enumerate(self.tools or ()):
            if isinstance(tool, FunctionTool):
                offered.append((("tools", number, *tool.schema_path), tool.function))
        skipped = [tool for tool in self.tools or () if isinstance(tool, Skipped)]
        return ToolUse.of(
            offered, self.tool_choice, parallel=self.parallel_tool_calls, skipped=skipped
        )

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
