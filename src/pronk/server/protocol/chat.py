"""``/v1/chat/completions``: conversations, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Annotated, Any, ClassVar, Literal, Protocol
from uuid import uuid4

from pydantic import Field

from pronk.outputs import Completion, Piece
from pronk.server.protocol.ask import TOOLS, Ask, Body, Text, Work, leaps, refuse, usage
from pronk.server.protocol.tokens import TokenTexts, chat_logprobs
from pronk.server.settings import Limits
from pronk.text.tokenizer import Tokenizer

__all__ = ["ChatAnswer", "ChatAsk", "Message", "TextPart", "plain_messages"]


class TextPart(Body):
    """A part of a message; models of text read no other type."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, description="of an answer that comes back: not used")


class Turn(Protocol):
    """Who says what."""

    @property
    def role(self) -> str:
        """By the name that templates know, or ``developer``."""
        ...

    @property
    def content(self) -> str | list[TextPart]:
        """A text, or parts of it."""
        ...

    @property
    def name(self) -> str | None:
        """Of who speaks, among several."""
        ...


class Message(Body):
    """A turn of a conversation. What answers of this server have beside their text may come back, being empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: Text | None = Field(None, max_length=64)
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = Field(None, max_length=0)
    annotations: list[Any] | None = Field(None, max_length=0)


class ChatAsk(Ask):
    """What ``/v1/chat/completions`` takes."""

    idle: ClassVar = {
        **Ask.idle,
        **TOOLS,
        "functions": [[]],
        "function_call": ["none", "auto"],
        "modalities": [["text"]],
        "reasoning_effort": ["none"],
        "response_format": [{"type": "text"}],
        "verbosity": ["medium"],
    }

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    def check(self, limits: Limits) -> None:
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

    def work(self, prompt: list[int], max_tokens: int, tokenizer: Tokenizer, frame: dict[str, Any]) -> Work:
        """What is to be done.

        Args:
            prompt: token ids of the conversation.
            max_tokens: most of the answer.
            tokenizer: of the model.
            frame: what every reply has.
        """
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return Work([prompt], self.params(max_tokens, logprobs), ChatAnswer(self, frame, TokenTexts(tokenizer)))


def plain_messages(messages: Sequence[Turn]) -> list[dict[str, Any]]:
    """Messages as templates know them: what a developer says is the system's."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content
            if isinstance(message.content, str)
            else [{"type": "text", "text": part.text} for part in message.content],
            **({} if message.name is None else {"name": message.name}),
        }
        for message in messages
    ]


@dataclass
class ChatAnswer:
    """Puts the replies of ``/v1/chat/completions`` together.

    Attributes:
        ask: what was asked for.
        frame: what every reply has.
        texts: of the model's tokens.
    """

    ask: ChatAsk
    frame: dict[str, Any]
    texts: TokenTexts
    ident: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")

    def __post_init__(self) -> None:
        self.n = self.ask.n or 1
        head = {"id": self.ident, "created": int(time()), **self.frame}
        self._whole = {**head, "object": "chat.completion"}
        self._part = {**head, "object": "chat.completion.chunk"} | ({"usage": None} if self.ask.include_usage else {})

    def start(self) -> list[dict[str, Any]]:
        """Who speaks, of each sample."""
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self.n)]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """One chunk for each sample that has new tokens, and one more for each that ends."""
        chunks = []
        for index in sorted({piece.index for piece in pieces}):
            own = [piece for piece in pieces if piece.index == index]
            chunk = self._chunk(index, {"content": "".join(piece.text for piece in own)})
            chunk["choices"][0]["logprobs"] = self._logprobs([piece.logprobs or {} for piece in own])
            if self.ask.leaps:
                chunk["choices"][0]["leaps"] = leaps(own)
            chunks.append(chunk)
            if (done := own[-1].completion) is not None:
                last = self._chunk(index, {})
                last["choices"][0] |= {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
                chunks.append(last)
        return chunks

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
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": self._logprobs(completion.logprobs or []),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "seed": completion.seed,
            }
            for index, completion in enumerate(done)
        ]
        return {**self._whole, "choices": choices, "usage": usage(done, self.n)}

    def _logprobs(self, reports: Sequence[dict[int, float]]) -> dict[str, Any] | None:
        return chat_logprobs(self.texts, reports, self.ask.top_logprobs or 0) if self.ask.logprobs else None

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {**self._part, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
