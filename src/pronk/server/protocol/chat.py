"""Bodies of ``/v1/chat/completions``, which renders conversations with the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field, model_validator

from pronk.outputs import Completion, Piece
from pronk.server.protocol.request import PreparedRequest, RequestBody, Text, by_sample, check_max, leaps, refuse, usage
from pronk.server.protocol.tokens import TokenTexts, chat_logprobs
from pronk.server.protocol.tools import ToolCall, ToolCallParser, ToolRequest
from pronk.server.settings import RequestLimits
from pronk.tokenization.chat.tools import ToolCallFormat
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["ChatMessage", "ChatReply", "ChatRequest", "ChatTurn", "TextPart", "template_messages"]

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
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = Field(None, max_length=_MAX_CALLS)
    tool_call_id: Text | None = Field(None, max_length=64)
    annotations: list[Any] | None = Field(None, max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _check_calls(cls, value: Any) -> Any:
        """Check that tool fields fit the role; in a message with tool calls, set missing content to ``""``."""
        if not isinstance(value, dict):
            return value
        calls, role = value.get("tool_calls"), value.get("role")
        if calls and role != "assistant":
            raise refuse("messages", f"expected tool_calls with the role 'assistant' only, found the role {role!r}")
        if (role == "tool") != (value.get("tool_call_id") is not None):
            raise refuse("messages", "expected a tool_call_id with the role 'tool', and with no other")
        return {**value, "content": ""} if calls and value.get("content") is None else value

    def to_template(self) -> dict[str, Any]:
        """Return the message as a dict for chat templates, tool calls included."""
        calls = [call.model_dump(include={"id", "type", "function"}) for call in self.tool_calls or ()]
        more = {"name": self.name, "tool_calls": calls or None, "tool_call_id": self.tool_call_id}
        return {**super().to_template(), **{name: value for name, value in more.items() if value is not None}}


class ChatRequest(ToolRequest):
    """Body of ``/v1/chat/completions``."""

    noop_values: ClassVar = {
        **ToolRequest.noop_values,
        "functions": [[]],
        "function_call": ["none", "auto"],
        "modalities": [["text"]],
        "reasoning_effort": ["none"],
        "verbosity": ["medium"],
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    def check(self, limits: RequestLimits) -> None:
        """Check the options; see :meth:`TextRequest.check`."""
        super().check(limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs", "expected logprobs: true, found none; add it, or leave top_logprobs out")
        check_max("top_logprobs", self.top_logprobs, limits.logprobs)
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refuse("max_tokens", "expected max_completion_tokens of the same value, found another; leave one out")

    @property
    def requested_max_tokens(self) -> int | None:
        """Maximum number of tokens to generate, if the request sets one."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def prepare(
        self,
        prompt: list[int],
        max_tokens: int,
        tokenizer: Tokenizer,
        shared_fields: dict[str, Any],
        call_format: ToolCallFormat | None = None,
    ) -> PreparedRequest:
        """Return the engine's input and the builder of the reply for ``prompt``, the tokenized conversation.

        ``shared_fields`` are equal in the reply and in every chunk. ``call_format`` is None if no calls are allowed.
        """
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        guide = self.guide() if call_format is None else self.call_guide(call_format)
        params = self.params(max_tokens, logprobs, guide=guide)
        return PreparedRequest([prompt], params, ChatReply(self, shared_fields, TokenTexts(tokenizer), call_format))


def template_messages(messages: Sequence[ChatTurn]) -> list[dict[str, Any]]:
    """Return the messages as dicts for chat templates."""
    return [message.to_template() for message in messages]


@dataclass
class ChatReply:
    """Builder of the replies of ``/v1/chat/completions``."""

    request: ChatRequest
    shared_fields: dict[str, Any]  # fields that are equal in the reply and in every chunk
    texts: TokenTexts
    call_format: ToolCallFormat | None = None  # format of tool calls; None if the request allows no calls

    def __post_init__(self) -> None:
        self.n = self.request.n or 1
        head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), **self.shared_fields}
        self._reply_head = {**head, "object": "chat.completion"}
        self._chunk_head = {**head, "object": "chat.completion.chunk"}
        if self.request.include_usage:
            self._chunk_head["usage"] = None
        self._parsers: list[ToolCallParser] = []  # one per sample; empty if the request allows no calls
        if self.call_format is not None:
            names, allows_text = self.request.allowed_names, self.request.allows_text
            self._parsers = [ToolCallParser(self.call_format, names, allows_text=allows_text) for _ in range(self.n)]

    def start(self) -> list[dict[str, Any]]:
        """Return one chunk per sample with the role; the content is null if the request allows calls."""
        delta = {"role": "assistant", "content": None if self._parsers else ""}
        return [self._chunk(index, delta) for index in range(self.n)]

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
        """Return one chunk per text or tool-call delta; the first has all logprobs of ``sample_pieces``."""
        text: list[dict[str, Any]] = [{"content": "".join(piece.text for piece in sample_pieces)}]
        deltas = self._parsers[index].parse(sample_pieces) if self._parsers else text
        if not deltas and (self.request.logprobs or self.request.leaps):
            deltas = [{}]  # tokens without text also need a chunk for their log-probabilities
        chunks = [self._chunk(index, delta) for delta in deltas]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs([piece.logprobs or {} for piece in sample_pieces])
            if self.request.leaps:
                chunks[0]["choices"][0]["leaps"] = leaps(sample_pieces)
        return chunks

    def record(self, pieces: Sequence[Piece]) -> None:
        """Parse tool calls from tokens: ``Completion.text`` lacks the special tokens that begin calls."""
        for index, sample_pieces in by_sample(pieces) if self._parsers else []:
            self._parsers[index].parse(sample_pieces)

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return a chunk with the token counts, if requested."""
        return [{**self._chunk_head, "choices": [], "usage": usage(done, self.n)}] if self.request.include_usage else []

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole reply."""
        choices = [
            {
                "index": index,
                "message": self._message(index, completion),
                "logprobs": self._logprobs(completion.logprobs or []),
                "finish_reason": self._reason(index, completion),
                "stop_reason": completion.stop_reason,
                "seed": completion.seed,
            }
            for index, completion in enumerate(done)
        ]
        return {**self._reply_head, "choices": choices, "usage": usage(done, self.n)}

    def _message(self, index: int, done: Completion) -> dict[str, Any]:
        if self._parsers:
            return self._parsers[index].message()
        return {"role": "assistant", "content": done.text, "refusal": None}

    def _reason(self, index: int, done: Completion) -> str:
        return self._parsers[index].finish_reason(done) if self._parsers else done.finish_reason

    def _logprobs(self, reports: Sequence[dict[int, float]]) -> dict[str, Any] | None:
        return chat_logprobs(self.texts, reports, self.request.top_logprobs or 0) if self.request.logprobs else None

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._chunk_head, "choices": [choice]}
