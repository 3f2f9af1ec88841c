"""Bodies of ``/v1/chat/completions``, which renders conversations with the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
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
from pronk.server.protocol.request import (
    NO_LIMIT,
    MaxTokens,
    Record,
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
    """Base of messages: role and content."""

    places: ClassVar[Sequence[str]] = ("message",)

    role: str
    content: Content

    def to_template(self) -> dict[str, Any]:
        """Return the message as a dict for chat templates.

        The role ``developer`` becomes ``system``.
        """
        parts = [{"type": "text", "text": text} for text in texts_of(self.content)]
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content if isinstance(self.content, str) else parts,
        }


class ChatMessage(ChatTurn):
    """Message of ``/v1/chat/completions``.

    Answers may be sent back as they are, empty fields included.
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

        In the former API of functions, an assistant has one ``function_call``, and its result the
        role ``function``.
        """
        if value.get("role") == "function":
            value = {**value, "role": "tool"}
        if value.get("function_call") and not value.get("tool_calls"):
            others = {name: each for name, each in value.items() if name != "function_call"}
            value = {**others, "tool_calls": [{"function": value["function_call"]}]}
        calls = value.get("tool_calls")
        role = value.get("role")
        if calls and role != "assistant":
            raise refuse(
                "messages",
                f"expected tool_calls with the role 'assistant' only, found the role {role!r}",
            )
        if role != "tool" and value.get("tool_call_id"):
            raise refuse(
                "messages", "expected a tool_call_id with the role 'tool', and with no other"
            )
        if role in ("assistant", "tool") and value.get("content") is None:
            return {**value, "content": value.get("refusal") or ""}
        return {**value, "content": as_result(value["content"])} if role == "tool" else value

    @property
    def skipped_calls(self) -> Sequence[str]:
        """Ids of calls of tools that this server does not use."""
        return [call.id for call in self.tool_calls or () if isinstance(call, SkippedCall)]

    def to_template(self) -> dict[str, Any]:
        """Return the message as a dict for chat templates, tool calls and thoughts included."""
        functions = [call for call in self.tool_calls or () if isinstance(call, ToolCall)]
        calls = [call.model_dump(include={"id", "type", "function"}) for call in functions]
        more = {"name": self.name, "tool_calls": calls or None, "tool_call_id": self.tool_call_id}
        # Templates read earlier thoughts under one of two names; most drop them before the last
        # user message.
        more |= {"reasoning_content": self.reasoning_content, "thinking": self.reasoning_content}
        return {
            **super().to_template(),
            **{name: value for name, value in more.items() if value is not None},
        }


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
        """Return one chunk per sample with the role.

        The content is null if thoughts or calls may come.
        """
        delta = {"role": "assistant", "content": None if self.has_blocks else ""}
        return [self._chunk(index, delta) for index in range(len(self.parsers))]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return chunks for each sample with new tokens, and a last chunk for each sample that ends."""
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
        """Return one chunk per delta; the first has all logprobs of ``sample_pieces``."""
        deltas = [_delta(delta) for delta in self.parsers[index].parse(sample_pieces)]
        if not deltas and (self.request.logprobs or self.request.leaps or not self.has_blocks):
            # Tokens without text also need a chunk for their log-probabilities.
            deltas = [{}] if self.has_blocks else [{"content": ""}]
        chunks = [self._chunk(index, delta) for delta in deltas]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(
                [piece.logprobs or {} for piece in sample_pieces]
            )
            if self.request.leaps:
                chunks[0]["choices"][0]["leaps"] = leaps(sample_pieces)
        return chunks

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return a chunk with the token counts, if requested."""
        return (
            [{**self._chunk_head, "choices": [], "usage": self._usage(done)}]
            if self.request.include_usage
            else []
        )

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
        return usage(
            done, len(self.parsers), sum(parser.num_thought_tokens for parser in self.parsers)
        )

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
    calls = [
        tool_call(block.call.ident, block.call.name, block.content)
        for block in parser.blocks
        if block.call
    ]
    message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    more = {"reasoning_content": thoughts, "tool_calls": calls}
    return message | {name: value for name, value in more.items() if value}


def _delta(delta: Delta) -> dict[str, Any]:
    block = delta.block
    content = delta.content
    if block.call is None:
        return {"content" if block.kind == "text" else "reasoning_content": content}
    if delta.is_first:
        return {
            "tool_calls": [
                {"index": block.call.index, **tool_call(block.call.ident, block.call.name, content)}
            ]
        }
    return {"tool_calls": [{"index": block.call.index, "function": {"arguments": content}}]}


class ChatRequest(GuidedRequest, ConversationRequest):
    """Body of ``/v1/chat/completions``."""

    places: ClassVar[Sequence[str]] = ("text", "chat")
    reply_type: ClassVar = ChatReply

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
            raise refuse(
                "top_logprobs",
                "expected logprobs: true, found none; add it, or leave top_logprobs out",
            )
        check_max("top_logprobs", self.top_logprobs, limits.logprobs)
        given = {*self._token_limits().values()}
        if len(given) > 1:
            found = " and ".join(f"{name}: {limit}" for name, limit in self._token_limits().items())
            raise refuse(
                "max_completion_tokens",
                f"expected the value of max_tokens, found {found}; leave one out",
            )
        self.check_beginning()

    def check_beginning(self) -> None:
        """Raise ``ApiError`` if the request neither begins an answer nor continues one."""
        if self.add_generation_prompt is False and not self.continues_answer:
            raise unsupported(
                "add_generation_prompt",
                "expected true, found false; add continue_final_message: true",
            )
        if self.continues_answer and self.messages[-1].role != "assistant":
            found = f"found {self.messages[-1].role!r}"
            raise refuse(
                "messages", f"expected a last message of the role 'assistant' to continue, {found}"
            )

    @property
    def continues_answer(self) -> bool:
        return bool(self.continue_final_message or self.messages[-1].prefix)

    def _token_limits(self) -> dict[str, int]:
        """Return the fields that limit the number of tokens."""
        limits = {name: getattr(self, name) for name in ("max_tokens", "max_completion_tokens")}
        return {
            self.written(name): limit
            for name, limit in limits.items()
            if limit not in (None, NO_LIMIT)
        }

    @property
    def limit_field(self) -> str:
        return next(iter(self._token_limits()), "max_tokens")

    @property
    def requested_max_tokens(self) -> int | None:
        limit = next(iter(self._token_limits().values()), None)
        return limit if limit is not None else self.max_tokens or self.max_completion_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages without results of tools that this server does not use."""
        skipped = {ident for message in self.messages for ident in message.skipped_calls}
        return [
            message.to_template()
            for message in self.messages
            if not (message.role == "tool" and message.tool_call_id in skipped)
        ]

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
