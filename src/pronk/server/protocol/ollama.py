"""Requests and replies of Ollama's API: ``/api/chat``, ``/api/generate``, ``/api/embed``, ….

A stream is one JSON object per line; the last one has ``"done": true`` and the token counts. The
options of a request stand in its object ``options``, whose names the table of fields translates
(:mod:`pronk.server.protocol.field_table`). Durations are in nanoseconds.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import Field

from pronk import Completion, Piece
from pronk.base.arrays import Array
from pronk.server.protocol.answers import chat_logprobs
from pronk.server.protocol.chat import ChatMessage, ChatRequest
from pronk.server.protocol.conversation import AnswerReply, ConversationRequest
from pronk.server.protocol.guides import GuidedRequest
from pronk.server.protocol.infill import FillRequest
from pronk.server.protocol.request import (
    MaxTokens,
    PreparedRequest,
    Prompts,
    RequestBody,
    Text,
    check_max,
    refuse,
)
from pronk.server.protocol.small_routes import EmbeddingRequest
from pronk.server.protocol.tools import ToolUse, complete_arguments
from pronk.server.settings import RequestLimits
from pronk.text import Tokenizer

_NANOSECONDS = 10**9
# Version of Ollama whose API this is; clients choose features by it.
API_VERSION = "0.12.6"


def to_time(seconds: float) -> str:
    """Return a time, in seconds since 1970, in the form of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _now() -> str:
    return to_time(datetime.now(UTC).timestamp())


def read_counts(completion: Completion) -> dict[str, Any]:
    """Return the token counts and durations of an answer, in the last line of its stream."""
    stats = completion.stats
    first = stats.ttft
    return {
        "total_duration": round(stats.total_seconds * _NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": round(first * _NANOSECONDS),
        "eval_count": stats.generated_tokens,
        "eval_duration": round((stats.total_seconds - first) * _NANOSECONDS),
    }


@dataclass
class OllamaReply(AnswerReply):
    """Base of the builders of replies; an answer has one sample.

    A tool call is one message, so that it is sent once its arguments are complete.
    """

    request: OllamaChatRequest | OllamaGenerateRequest
    _num_told: int = field(default=0, init=False)  # number of blocks whose calls are sent

    @abstractmethod
    def _content(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a line with ``content``, ``thinking`` and ``tool_calls``."""

    def start(self) -> list[dict[str, Any]]:
        """Return no lines: Ollama's streams begin with the first token."""
        return []

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the lines of a step: new text, new thoughts, and complete tool calls."""
        parser = self.parsers[0]
        lines = list[dict[str, Any]]()
        for delta in parser.parse(pieces):
            lines += self._complete_calls(delta.block.number)
            if delta.block.call is None and delta.content:
                name = "content" if delta.block.kind == "text" else "thinking"
                lines.append(self._line({name: delta.content}))
        if pieces[-1].completion is not None:
            lines += self._complete_calls(len(parser.blocks))
        if self.request.logprobs:
            lines = lines or [self._line({})]
            lines[0]["logprobs"] = self._logprobs([piece.logprobs or {} for piece in pieces])
        return lines

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the last line, with the reason of the end and the token counts."""
        (completion,) = done
        return [{**self._line({}), **_end(completion)}]

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = done
        parser = self.parsers[0]
        message: dict[str, Any] = {"content": parser.content("text")}
        if thoughts := parser.content("thought"):
            message["thinking"] = thoughts
        calls = [_call(block.call.name, block.content) for block in parser.blocks if block.call]
        if calls:
            message["tool_calls"] = calls
        reply = {**self._line(message), **_end(completion)}
        if self.request.logprobs:
            reply["logprobs"] = self._logprobs(completion.logprobs or [])
        return reply

    def _complete_calls(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield a line for each tool call that was not sent yet, in blocks before ``number``."""
        for block in self.parsers[0].blocks[self._num_told : number]:
            if block.call is not None:
                yield self._line({"tool_calls": [_call(block.call.name, block.content)]})
        self._num_told = max(self._num_told, number)

    def _line(self, message: Mapping[str, Any]) -> dict[str, Any]:
        head = {"model": self.shared_fields["model"], "created_at": _now()}
        return {**head, **self._content(message), "done": False}

    def _logprobs(self, reports: Sequence[dict[int, float]]) -> list[dict[str, Any]]:
        top = self.request.top_logprobs or 0
        entries: list[dict[str, Any]] = chat_logprobs(self.texts, reports, top)["content"]
        return entries


class OllamaChatReply(OllamaReply):
    """Builder of the reply to a request of ``/api/chat``."""

    def _content(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "", **message}}


class OllamaGenerateReply(OllamaReply):
    """Builder of the reply to a request of ``/api/generate``, whose answers have no tool calls."""

    def _content(self, message: Mapping[str, Any]) -> dict[str, Any]:
        fields = {"response": message.get("content", "")}
        if "thinking" in message:
            fields["thinking"] = message["thinking"]
        return fields


def _end(completion: Completion) -> dict[str, Any]:
    reason = {"done": True, "done_reason": completion.finish_reason}
    return {**reason, **read_counts(completion)}


def _call(name: str | None, arguments: str) -> dict[str, Any]:
    """Return a tool call; the arguments of a call that was cut off are closed."""
    closed = complete_arguments(arguments)
    return {"function": {"name": name, "arguments": json.loads(closed) if closed.strip() else {}}}


def _check_one_sample(number: int | None) -> None:
    if number not in (None, 1):
        raise refuse("n", f"expected 1, found {number}; send several requests")


class OllamaChatRequest(ChatRequest):
    """Body of ``/api/chat``: a chat request that streams by default."""

    places: ClassVar[Sequence[str]] = ("text", "chat", "ollama")
    reply_type: ClassVar = OllamaChatReply

    # Without messages, the model is loaded and generates nothing.
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field([])
    stream: bool | None = True

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        _check_one_sample(self.n)


class OllamaGenerateRequest(GuidedRequest, ConversationRequest):
    """Body of ``/api/generate``: a conversation of one message, which streams by default."""

    places: ClassVar[Sequence[str]] = ("text", "ollama", "ollama_generate")
    reply_type: ClassVar = OllamaGenerateReply
    messages_field: ClassVar = "prompt"

    prompt: Text = ""  # empty: the model is loaded, and generates nothing
    system: Text | None = None
    suffix: Text | None = Field(
        None, description="Text after the place to fill: see OllamaInfillRequest."
    )
    stream: bool | None = True
    max_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        _check_one_sample(self.n)
        if self.top_logprobs and not self.logprobs:
            problem = "expected logprobs: true, found none; add it, or leave top_logprobs out"
            raise refuse("top_logprobs", problem)
        check_max("top_logprobs", self.top_logprobs, limits.logprobs)

    def conversation(self) -> list[dict[str, Any]]:
        message = {"role": "user", "content": self.prompt}
        if self.system is None:
            return [message]
        return [{"role": "system", "content": self.system}, message]

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def read_tools(self) -> ToolUse:
        return ToolUse.of([], None)


class OllamaInfillRequest(FillRequest):
    """Body of ``/api/generate`` with a ``suffix``: the answer is the text before the suffix."""

    places: ClassVar[Sequence[str]] = ("text", "completions", "ollama")
    place: ClassVar[str] = "with a suffix"

    prompt: Text = ""
    stream: bool | None = True

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        _check_one_sample(self.n)

    def prepare(
        self,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer,  # noqa: ARG002 - the base class's argument, for log-probabilities
        shared_fields: dict[str, Any],
    ) -> PreparedRequest:
        return PreparedRequest(self.engine_inputs(prompts), OllamaInfillReply(shared_fields))


@dataclass
class OllamaInfillReply:
    """Builder of the reply to a request of ``/api/generate`` with a ``suffix``."""

    shared_fields: Mapping[str, Any]  # fields that are equal in the reply and in every line

    def start(self) -> list[dict[str, Any]]:
        """Return no lines: Ollama's streams begin with the first token."""
        return []

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return one line with the step's text."""
        text = "".join(piece.text for piece in pieces)
        return [self._line(text)] if text else []

    def record(self, pieces: Sequence[Piece]) -> None:
        """Do nothing with a step's new tokens: :meth:`whole` reads the finished sample instead."""

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the last line, with the reason of the end and the token counts."""
        (completion,) = done
        return [{**self._line(""), **_end(completion)}]

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = done
        return {**self._line(completion.text), **_end(completion)}

    def _line(self, text: str) -> dict[str, Any]:
        head = {"model": self.shared_fields["model"], "created_at": _now()}
        return {**head, "response": text, "done": False}


class OllamaEmbedRequest(EmbeddingRequest):
    """Body of ``/api/embed``."""

    def reply(self, model: str, vectors: Sequence[Array], num_tokens: int) -> dict[str, Any]:
        """Return the reply with the embeddings of all texts; see the base class."""
        return {
            "model": model,
            "embeddings": [vector.tolist() for vector in vectors],
            "prompt_eval_count": num_tokens,
        }


class OllamaEmbeddingsRequest(EmbeddingRequest):
    """Body of ``/api/embeddings``, the older route for one text in the field ``prompt``."""

    input: Prompts = Field(alias="prompt")

    def reply(self, model: str, vectors: Sequence[Array], num_tokens: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the reply with the embedding of the first text; see the base class."""
        return {"embedding": vectors[0].tolist()}


class ShowRequest(RequestBody):
    """Body of ``/api/show``."""

    places: ClassVar[Sequence[str]] = ("ollama_show",)

    model: Text | None = None


class PullRequest(RequestBody):
    """Body of ``/api/pull``, which streams by default."""

    places: ClassVar[Sequence[str]] = ("ollama_pull",)

    model: Text
    stream: bool | None = True
