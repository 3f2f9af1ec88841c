"""``/v1/chat/completions``: conversations, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field, model_validator

from pronk.outputs import Completion, Piece
from pronk.server.protocol.request import GenerationWork, RequestBody, Text, leaps, refuse, usage
from pronk.server.protocol.tokens import TokenTexts, chat_logprobs
from pronk.server.protocol.tools import ToolCall, ToolCallMessage, ToolRequest
from pronk.server.settings import RequestLimits
from pronk.tokenization.chat.tools import ToolForm
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["ChatMessage", "ChatReply", "ChatRequest", "ChatTurn", "TextPart", "plain_messages"]


_MOST_CALLS = 128  # in one message; OpenAI's


class TextPart(RequestBody):
    """A part of a message; models of text read no other type."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, description="of an answer that comes back: not used")


class ChatTurn(RequestBody):
    """Who says what."""

    role: str
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]

    def plain(self) -> dict[str, Any]:
        """As templates know it: what a developer says is the system's."""
        parts = self.content
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": [{"type": "text", "text": part.text} for part in parts] if isinstance(parts, list) else parts,
        }


class ChatMessage(ChatTurn):
    """A turn of a conversation. What answers of this server have beside text and calls may come back, being empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Text | None = Field(None, max_length=64)
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = Field(None, max_length=_MOST_CALLS)
    tool_call_id: Text | None = Field(None, max_length=64)
    annotations: list[Any] | None = Field(None, max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        """Only a message that calls tools may do without a content; the answer of a tool says which call it is for."""
        if not isinstance(value, dict):
            return value
        called, role = value.get("tool_calls"), value.get("role")
        if called and role != "assistant":
            raise refuse("messages", f"expected tool_calls of the assistant alone, found them with the role {role!r}")
        if (role == "tool") != (value.get("tool_call_id") is not None):
            raise refuse("messages", "expected a tool_call_id with the role 'tool', and with no other")
        return {**value, "content": ""} if called and value.get("content") is None else value

    def plain(self) -> dict[str, Any]:
        """See :meth:`ChatTurn.plain`."""
        calls = [call.model_dump(include={"id", "type", "function"}) for call in self.tool_calls or ()]
        more = {"name": self.name, "tool_calls": calls or None, "tool_call_id": self.tool_call_id}
        return {**super().plain(), **{name: value for name, value in more.items() if value is not None}}


class ChatRequest(ToolRequest):
    """What ``/v1/chat/completions`` takes."""

    idle: ClassVar = {
        **ToolRequest.idle,
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
        """Hold the options to the server's limits; see :meth:`Ask.check`."""
        super().check(limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs", "expected logprobs: true beside it")
        if (self.top_logprobs or 0) > limits.logprobs:
            raise refuse("top_logprobs", f"expected at most {limits.logprobs}, found {self.top_logprobs}")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refuse("max_tokens", "expected it or max_completion_tokens, found both with different values")

    @property
    def wanted(self) -> int | None:
        """Most tokens of the answer, if the client said."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def work(
        self,
        prompt: list[int],
        max_tokens: int,
        tokenizer: Tokenizer,
        frame: dict[str, Any],
        form: ToolForm | None = None,
    ) -> GenerationWork:
        """What is to be done.

        Args:
            prompt: token ids of the conversation.
            max_tokens: most of the answer.
            tokenizer: of the model.
            frame: what every reply has.
            form: how the model calls tools, where it may.
        """
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self.params(max_tokens, logprobs, guide=self.guide() if form is None else self.call_guide(form))
        return GenerationWork([prompt], params, ChatReply(self, frame, TokenTexts(tokenizer), form))


def plain_messages(messages: Sequence[ChatTurn]) -> list[dict[str, Any]]:
    """Messages as templates know them."""
    return [message.plain() for message in messages]


@dataclass
class ChatReply:
    """Puts the replies of ``/v1/chat/completions`` together.

    Attributes:
        ask: what was asked for.
        frame: what every reply has.
        texts: of the model's tokens.
        form: how the model calls tools, where it may.
    """

    ask: ChatRequest
    frame: dict[str, Any]
    texts: TokenTexts
    form: ToolForm | None = None
    ident: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")

    def __post_init__(self) -> None:
        self.n = self.ask.n or 1
        head = {"id": self.ident, "created": int(time()), **self.frame}
        self._whole = {**head, "object": "chat.completion"}
        self._part = {**head, "object": "chat.completion.chunk"} | ({"usage": None} if self.ask.include_usage else {})

        self._called = (
            []
            if self.form is None
            else [ToolCallMessage(self.form, self.ask.allowed, free=self.ask.free) for _ in range(self.n)]
        )

    def start(self) -> list[dict[str, Any]]:
        """Who speaks, of each sample; one that calls tools may have no content."""
        said = {"role": "assistant", "content": None if self._called else ""}
        return [self._chunk(index, said) for index in range(self.n)]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """What each sample that has new tokens has of them, and one more chunk for each that ends."""
        chunks = []
        for index, own in _by_sample(pieces):
            chunks += self._said(index, own)
            if (done := own[-1].completion) is not None:
                last = self._chunk(index, {})
                last["choices"][0] |= {"finish_reason": self._reason(index, done), "stop_reason": done.stop_reason}
                chunks.append(last)
        return chunks

    def _said(self, index: int, own: Sequence[Piece]) -> list[dict[str, Any]]:
        """One chunk of text; or one for each change between text and calls, the first with all about the tokens."""
        text: list[dict[str, Any]] = [{"content": "".join(piece.text for piece in own)}]
        deltas = self._called[index].read(own) if self._called else text
        if not deltas and (self.ask.logprobs or self.ask.leaps):
            deltas = [{}]
        chunks = [self._chunk(index, delta) for delta in deltas]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs([piece.logprobs or {} for piece in own])
            if self.ask.leaps:
                chunks[0]["choices"][0]["leaps"] = leaps(own)
        return chunks

    def read(self, pieces: Sequence[Piece]) -> None:
        """Which tokens it came with tells text from calls."""
        if self._called:
            for index, own in _by_sample(pieces):
                self._called[index].read(own)

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """The usage, if it was asked for."""
        if not self.ask.include_usage:
            return []
        return [{**self._part, "choices": [], "usage": usage(done, self.n)}]

    def body(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Everything."""
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
        return {**self._whole, "choices": choices, "usage": usage(done, self.n)}

    def _message(self, index: int, done: Completion) -> dict[str, Any]:
        if self._called:
            return self._called[index].message()
        return {"role": "assistant", "content": done.text, "refusal": None}

    def _reason(self, index: int, done: Completion) -> str:
        return self._called[index].finish_reason(done) if self._called else done.finish_reason

    def _logprobs(self, reports: Sequence[dict[int, float]]) -> dict[str, Any] | None:
        return chat_logprobs(self.texts, reports, self.ask.top_logprobs or 0) if self.ask.logprobs else None

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {**self._part, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}


def _by_sample(pieces: Sequence[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    for index in sorted({piece.index for piece in pieces}):
        yield index, [piece for piece in pieces if piece.index == index]
