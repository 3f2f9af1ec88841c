"""Requests and replies of ``/infill``, the route of llama.cpp's server for editors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pronk import Completion, ContextFile, Piece
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.request import (
    NO_LIMIT,
    EngineInputs,
    MaxTokens,
    PreparedRequest,
    Record,
    Text,
    by_sample,
    check_max,
    unsupported,
    usage,
)
from pronk.server.settings import RequestLimits
from pronk.text import Tokenizer

_MAX_FILES = 256  # maximum number of files of context in one request


class ExtraFile(Record):
    """Element of ``input_extra``: a file, or a part of one, that the model reads first."""

    text: Text
    filename: Text = Field("tmp", max_length=1024)


class FillRequest(CompletionRequest):
    """Base of requests, outside of OpenAI's API, for the text between two others."""

    place: ClassVar[str]  # where fields of completions are refused, for error messages

    max_tokens: MaxTokens | Literal[0] | None = NO_LIMIT

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        for name in ("echo", "leaps", "logprobs"):
            if getattr(self, name):
                problem = f"expected no such field {self.place}, found one; use /v1/completions"
                raise unsupported(name, problem)

    def engine_inputs(self, prompts: Sequence[list[int]]) -> EngineInputs:
        """Return the engine's input; 0 tokens become 1, which the reply may leave out."""
        params = self.params(max(1, self.max_tokens or 0), guide=self.guide())
        return EngineInputs(prompts, params)


class InfillRequest(FillRequest):
    """Body of ``/infill``; the text goes between ``input_prefix + prompt`` and ``input_suffix``.

    With ``n_predict: 0``, the prompt is only read into the prefix cache, and the text is empty.
    """

    places: ClassVar[Sequence[str]] = ("text", "completions", "infill")
    place: ClassVar[str] = "in /infill"

    input_prefix: Text = ""
    prompt: Text = Field("", description="Appended to input_prefix.")
    suffix: Text | None = Field("", alias="input_suffix")
    input_extra: Annotated[list[ExtraFile], Field(fail_fast=True)] = Field(
        [], max_length=_MAX_FILES
    )

    def prompts(self) -> list[str | list[int]]:
        """Return the text before the place to fill, the only prompt."""
        return [self.input_prefix + self.prompt]

    def context(self) -> list[ContextFile]:
        return [ContextFile(each.text, each.filename) for each in self.input_extra]

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        check_max("n", self.n, 1)

    def check_length(self) -> None:
        """Allow ``max_tokens: 0`` without ``echo``."""

    def prepare(
        self,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer,  # noqa: ARG002 - the base class's argument, for log-probabilities
        shared_fields: dict[str, Any],
    ) -> PreparedRequest:
        reply = InfillReply(shared_fields, is_empty=self.max_tokens == 0)
        return PreparedRequest(self.engine_inputs(prompts), reply)


@dataclass
class InfillReply:
    """Builder of the reply to a request of ``/infill``, whole or in chunks, as in llama.cpp."""

    shared_fields: dict[str, Any]  # fields that are equal in the reply and in every chunk
    is_empty: bool  # whether the reply leaves out the generated token (max_tokens is 0)

    def start(self) -> list[dict[str, Any]]:
        """Return no chunk: the first one has text."""
        return []

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return one chunk with the step's text."""
        if self.is_empty:
            return []
        chunks = list[dict[str, Any]]()
        for index, sample_pieces in by_sample(pieces):
            text = "".join(piece.text for piece in sample_pieces)
            chunks.append({"index": index, "content": text, "stop": False})
        return chunks

    def record(self, pieces: Sequence[Piece]) -> None:
        """Do nothing with a step's new tokens: :meth:`whole` reads the finished sample instead."""

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the last chunk: the reply without its text."""
        return [{**self.whole(done), "content": ""}]

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = done
        counts = usage(done, 1)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        stop_type = "eos"
        if self.is_empty or completion.finish_reason == "length":
            stop_type = "limit"
        elif isinstance(completion.stop_reason, str):
            stop_type = "word"
        num_generated = 0 if self.is_empty else counts["completion_tokens"]
        return {
            **self.shared_fields,
            "index": 0,
            "content": "" if self.is_empty else completion.text,
            "stop": True,
            "stop_type": stop_type,
            "stopping_word": completion.stop_reason if stop_type == "word" else "",
            "truncated": False,
            "tokens_predicted": num_generated,
            "tokens_evaluated": counts["prompt_tokens"],
            "tokens_cached": cached,
            "timings": {
                "cache_n": cached,
                "prompt_n": counts["prompt_tokens"] - cached,
                "predicted_n": num_generated,
                "draft_n": counts["drafted"],
                "draft_n_accepted": counts["accepted"],
            },
        }
