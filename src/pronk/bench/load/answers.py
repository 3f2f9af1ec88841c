"""An answer while it streams in: when there was text, how many tokens it has, why it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from pronk.bench.load.records import Call
from pronk.bench.load.sse import Event

__all__ = [
    "CUT_OFF",
    "NOT_PROTOCOL",
    "NO_CONNECTION",
    "NO_STREAM",
    "STREAMED_ERROR",
    "TIMED_OUT",
    "Answer",
    "AnswerError",
    "explain",
]

# What goes wrong with answers, besides codes of HTTP.
CUT_OFF, NO_CONNECTION, NO_STREAM, TIMED_OUT = "cut off", "no connection", "no stream", "timed out"
NOT_PROTOCOL, STREAMED_ERROR = "not the protocol", "error in the stream"

# Where chunks of a chat have what the model said; servers of models that think call that by two names.
_SAID = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


class AnswerError(Exception):
    """An answer that did not come, or not to its end.

    Attributes:
        label: what went wrong, in few words that many answers share.
        reason: the server's own words.
        status: of HTTP, if that is what went wrong.
    """

    def __init__(self, label: str, reason: str = "", status: int | None = None) -> None:
        super().__init__(f"{label}: {reason}" if reason else label)
        self.label = label
        self.reason = reason
        self.status = status


class Answer:
    """Takes the events of one answer with the moments at which they came, in seconds of one clock.

    Attributes:
        done: whether the end has been said.
        times: of the chunks with text.
        ended: when the last event came; 0 before the first.
    """

    def __init__(self) -> None:
        self.done = False
        self.times: list[float] = []
        self.ended = 0.0
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}

    def take(self, event: Event, at: float) -> None:
        """The next event.

        Raises:
            AnswerError: it tells of an error, or is none of the protocol's.
        """
        if self.done:
            return
        self.ended = at
        if event.data.strip() == "[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(event.data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            reason = f"expected a chunk in JSON, found {event.data!r:.80}"
            raise AnswerError(NOT_PROTOCOL, reason)
        if chunk.get("error") or event.type == "error":
            raise AnswerError(STREAMED_ERROR, explain(chunk))
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choose(choices[0], at)

    def _choose(self, choice: Mapping[str, Any], at: float) -> None:
        delta = choice.get("delta")
        if choice.get("text") or (isinstance(delta, dict) and any(delta.get(name) for name in _SAID)):
            self.times.append(at)
        if choice.get("finish_reason"):
            self._finish = str(choice["finish_reason"])

    def check_end(self) -> None:
        """The stream has ended.

        Raises:
            AnswerError: before the answer had. One that ends without a reason has been given up by its server, even
                if that says ``[DONE]``: llama-cpp-python does so when the next request comes.
        """
        if self._finish is None:
            reason = "the stream ended without a finish_reason"
            raise AnswerError(CUT_OFF, reason)

    def to_call(self, id: str, due: float, sent: float, origin: float, max_tokens: int) -> Call:  # noqa: A002
        """What is kept of it.

        Args:
            id: the prompt's.
            due: when it was to be sent.
            sent: when it was.
            origin: what ``due`` is counted from in the record.
            max_tokens: of the request, which an answer that was cut there has.
        """
        usage, details = self._usage, self._usage.get("prompt_tokens_details")
        times = self.times or [self.ended]
        tokens = _count(usage.get("completion_tokens"))
        return Call(
            id=id,
            due=due - origin,
            late=sent - due,
            ttft=times[0] - due,
            last=times[-1] - due,
            e2e=self.ended - due,
            gaps=tuple(after - before for before, after in pairwise(times)),
            chunks=len(self.times),
            tokens=tokens if tokens is not None else max_tokens if self._finish == "length" else len(self.times),
            counted="usage" if tokens is not None else "length" if self._finish == "length" else "chunks",
            prompt_tokens=_count(usage.get("prompt_tokens")),
            cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            steps=_count(usage.get("steps")),
            drafted=_count(usage.get("drafted")),
            accepted=_count(usage.get("accepted")),
            finish=self._finish,
        )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def explain(body: object) -> str:
    """A server's own words in the body of an error, on one line; the forms are OpenAI's, FastAPI's and plain text."""
    if isinstance(body, bytes):
        try:
            return explain(json.loads(body))
        except ValueError:
            body = body.decode("utf-8", "replace")
    while isinstance(body, dict):
        body = next((body[name] for name in ("error", "message", "detail") if body.get(name)), str(body))
    return " ".join(str(body).split())[:200]
