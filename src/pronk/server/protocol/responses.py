"""``/v1/responses``, as far as text goes: nothing is kept, so an answer cannot be gone on from by its id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from pronk.outputs import Completion, Piece
from pronk.server.protocol.chat import ChatTurn, TextPart, plain_messages
from pronk.server.protocol.guides import FormattedRequest, TextFormat
from pronk.server.protocol.request import (
    TOOLS,
    GenerationWork,
    RequestBody,
    Text,
    TextRequest,
    refuse,
    unsupported,
    usage,
)
from pronk.server.protocol.tokens import TokenTexts, chat_logprobs
from pronk.server.settings import RequestLimits
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["InputItem", "ResponsesReply", "ResponsesRequest"]


class InputItem(ChatTurn):
    """A message among the inputs; an answer of before may come back as it was."""

    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: None = None


class TextOptions(RequestBody):
    """Options of the answer's text."""

    idle: ClassVar = {"verbosity": ["medium"]}

    format: TextFormat | None = None


class ResponsesRequest(FormattedRequest):
    """What ``/v1/responses`` takes."""

    idle: ClassVar = {
        **TextRequest.idle,
        **TOOLS,
        "background": [False],
        "previous_response_id": [],  # answers are not kept: the conversation itself is the input
        "reasoning": [{}, {"effort": "none"}],
        "truncation": ["disabled"],
    }

    input: Text | Annotated[list[InputItem], Field(fail_fast=True)] = Field(min_length=1)
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    top_logprobs: int | None = Field(None, ge=0)
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextOptions | None = None

    def check(self, limits: RequestLimits) -> None:
        """Hold the options to the server's limits; see :meth:`TextRequest.check`."""
        super().check(limits)
        if (self.n or 1) != 1:
            raise refuse("n", f"expected 1 answer, found {self.n}")
        if (self.top_logprobs or 0) > limits.logprobs:
            raise refuse("top_logprobs", f"expected at most {limits.logprobs}, found {self.top_logprobs}")
        if self.leaps:
            raise unsupported("leaps", "events of responses have no place for them; use /v1/chat/completions")

    def forms(self) -> dict[str, Mapping[str, Any]]:
        """See :meth:`FormattedRequest.forms`."""
        return {} if self.text is None or self.text.format is None else self.text.format.forms()

    @property
    def wanted(self) -> int | None:
        """Most tokens of the answer, if the client said."""
        return self.max_output_tokens

    @property
    def reports(self) -> bool:
        """Whether log-probabilities are wanted."""
        return self.top_logprobs is not None or bool(self.include)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as templates know it."""
        told = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*told, {"role": "user", "content": self.input}]
        return told + plain_messages(self.input)

    def work(self, prompt: list[int], max_tokens: int, tokenizer: Tokenizer, frame: dict[str, Any]) -> GenerationWork:
        """What is to be done; see :meth:`ChatRequest.work`."""
        logprobs = (self.top_logprobs or 0) if self.reports else None
        params = self.params(max_tokens, logprobs, guide=self.guide())
        return GenerationWork([prompt], params, ResponsesReply(self, frame, TokenTexts(tokenizer)))


@dataclass
class ResponsesReply:
    """Puts the replies of ``/v1/responses`` together: events that are numbered, each with a name of its own.

    Attributes:
        ask: what was asked for.
        frame: what every reply has.
        texts: of the model's tokens.
    """

    ask: ResponsesRequest
    frame: dict[str, Any]
    texts: TokenTexts
    ident: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    item: str = field(default_factory=lambda: f"msg_{uuid4().hex}")

    def __post_init__(self) -> None:
        self._created = int(time())
        self._numbers = count()

    def start(self) -> list[dict[str, Any]]:
        """An answer without text."""
        begun = self._response("in_progress", [])
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
            self._at("response.content_part.added", part=self._part("", [])),
        ]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The step's text."""
        logprobs = self._logprobs([piece.logprobs or {} for piece in pieces])
        text = "".join(piece.text for piece in pieces)
        return [self._at("response.output_text.delta", delta=text, logprobs=logprobs)]

    def read(self, pieces: Sequence[Piece]) -> None:
        """Nothing that the texts do not tell."""

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """The whole answer, from the inside out."""
        (completion,) = done
        whole = self.body(done)
        item = whole["output"][0]
        part = item["content"][0]
        return [
            self._at("response.output_text.done", text=completion.text, logprobs=part["logprobs"]),
            self._at("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def body(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Everything."""
        (completion,) = done
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        part = self._part(completion.text, self._logprobs(completion.logprobs or []))
        counts = usage(done, 1)
        whole = self._response(status, [self._message(status, [part])])
        whole["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
            **{name: counts[name] for name in ("steps", "drafted", "accepted")},
        }
        return whole

    def _response(self, status: str, output: list[Any]) -> dict[str, Any]:
        ask = self.ask
        return {
            "id": self.ident,
            "object": "response",
            "created_at": self._created,
            **self.frame,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": ask.instructions,
            "max_output_tokens": ask.max_output_tokens,
            "metadata": ask.metadata or {},
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if ask.temperature is None else ask.temperature,
            "text": {"format": self._format()},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": ask.top_logprobs or 0,
            "top_p": 1.0 if ask.top_p is None else ask.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _format(self) -> dict[str, Any]:
        asked = None if self.ask.text is None else self.ask.text.format
        if asked is None or asked.type != "json_schema":
            return {"type": "text" if asked is None else asked.type}
        named = {"name": asked.name, "description": asked.description, "schema": asked.schema_}
        return {"type": asked.type, **named, "strict": asked.strict}

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {"id": self.item, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, reports: Sequence[dict[int, float]]) -> list[Any]:
        found = chat_logprobs(self.texts, reports, self.ask.top_logprobs or 0) if self.ask.reports else {"content": []}
        return list(found["content"])

    def _at(self, kind: str, **values: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self.item, output_index=0, content_index=0, **values)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **values}
