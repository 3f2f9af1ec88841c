"""Bodies of ``/v1/responses`` for text.

The server stores no responses, so ``previous_response_id`` is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from pronk.outputs import Completion, Piece
from pronk.server.protocol.chat import ChatTurn, template_messages
from pronk.server.protocol.guides import FormattedRequest, TextFormat
from pronk.server.protocol.request import PreparedRequest, RequestBody, Text, TextRequest, check_max, unsupported, usage
from pronk.server.protocol.tokens import TokenTexts, chat_logprobs
from pronk.server.settings import RequestLimits
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["InputItem", "ResponsesReply", "ResponsesRequest"]


class InputItem(ChatTurn):
    """Message in ``input``, possibly copied unchanged from an earlier response."""

    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"]
    name: None = None


class TextOptions(RequestBody):
    """Options of the answer's text."""

    noop_values: ClassVar = {"verbosity": ["medium"]}

    format: TextFormat | None = None


class ResponsesRequest(FormattedRequest):
    """Body of ``/v1/responses``."""

    noop_values: ClassVar = {
        **TextRequest.noop_values,
        "tools": [[]],
        "tool_choice": ["none", "auto"],
        "parallel_tool_calls": [True, False],
        "background": [False],
        "previous_response_id": [],
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
        """Check the options; see :meth:`TextRequest.check`."""
        super().check(limits)
        check_max("n", self.n, 1)
        check_max("top_logprobs", self.top_logprobs, limits.logprobs)
        if self.leaps:
            raise unsupported("leaps", "expected no such field in /v1/responses, found true; use /v1/chat/completions")

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        """Return the arguments of ``Guide`` for ``text.format``; see :meth:`FormattedRequest.guide_arguments`."""
        return {} if self.text is None or self.text.format is None else self.text.format.guide_arguments()

    @property
    def requested_max_tokens(self) -> int | None:
        """Maximum number of tokens to generate, if the request sets one."""
        return self.max_output_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are requested."""
        return self.top_logprobs is not None or bool(self.include)

    def messages(self) -> list[dict[str, Any]]:
        """Return instructions and input as messages for the chat template."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        return system + template_messages(self.input)

    def prepare(
        self, prompt: list[int], max_tokens: int, tokenizer: Tokenizer, shared_fields: dict[str, Any]
    ) -> PreparedRequest:
        """Return the engine's input and the builder of the reply, see :meth:`ChatRequest.prepare`."""
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        params = self.params(max_tokens, logprobs, guide=self.guide())
        return PreparedRequest([prompt], params, ResponsesReply(self, shared_fields, TokenTexts(tokenizer)))


@dataclass
class ResponsesReply:
    """Builder of the replies of ``/v1/responses``, whose streams consist of numbered events."""

    request: ResponsesRequest
    shared_fields: dict[str, Any]  # fields that are equal in every event with the response
    texts: TokenTexts

    def __post_init__(self) -> None:
        self._head = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time()),
            **self.shared_fields,
        }
        self._message_id = f"msg_{uuid4().hex}"
        self._numbers = count()

    def start(self) -> list[dict[str, Any]]:
        """Return the events that open the response, its message and its text."""
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
            self._text_event("response.content_part.added", part=self._part("", [])),
        ]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return one event with the text of a step."""
        logprobs = self._logprobs([piece.logprobs or {} for piece in pieces])
        text = "".join(piece.text for piece in pieces)
        return [self._text_event("response.output_text.delta", delta=text, logprobs=logprobs)]

    def record(self, pieces: Sequence[Piece]) -> None:
        """Do nothing: for :meth:`whole`, its argument ``done`` is enough."""

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the events that close the text, the content part, the message and the response."""
        (completion,) = done
        whole = self.whole(done)
        item = whole["output"][0]
        part = item["content"][0]
        return [
            self._text_event("response.output_text.done", text=completion.text, logprobs=part["logprobs"]),
            self._text_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole response."""
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
        request = self.request
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": self._format()},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _format(self) -> dict[str, Any]:
        form = None if self.request.text is None else self.request.text.format
        if form is None or form.type != "json_schema":
            return {"type": "text" if form is None else form.type}
        schema = {"name": form.name, "description": form.description, "schema": form.schema_}
        return {"type": form.type, **schema, "strict": form.strict}

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, reports: Sequence[dict[int, float]]) -> list[Any]:
        if not self.request.wants_logprobs:
            return []
        return list(chat_logprobs(self.texts, reports, self.request.top_logprobs or 0)["content"])

    def _text_event(self, kind: str, **values: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **values)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **values}
