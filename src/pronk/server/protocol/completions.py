"""Requests and replies of ``/v1/completions``, which continues prompts without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from pronk import Completion, ContextFile, Piece
from pronk.server.protocol.answers import Report, TokenTexts
from pronk.server.protocol.guides import GuidedRequest
from pronk.server.protocol.prediction import PredictedRequest
from pronk.server.protocol.request import (
    EngineInputs,
    MaxTokens,
    PreparedRequest,
    Prompts,
    Text,
    by_sample,
    check_max,
    leaps,
    list_prompts,
    refuse,
    unsupported,
    usage,
)
from pronk.server.settings import RequestLimits
from pronk.text import Tokenizer, TokenOffsets, output_offsets, prompt_offsets, prompt_text

_MAX_TOKENS = 16  # default of ``max_tokens`` in the OpenAI API


class CompletionRequest(PredictedRequest, GuidedRequest):
    """Body of ``/v1/completions``."""

    places: ClassVar[Sequence[str]] = ("text", "completions")

    prompt: Prompts
    suffix: Text | None = Field(None, description="Text after the place to fill.")
    max_tokens: MaxTokens | Literal[0] | None = None
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or a list of token ids."""
        return list_prompts(self.prompt)

    def context(self) -> list[ContextFile]:
        """Return the files that the model reads before the text to fill."""
        return []

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        count = len(self.prompts())
        if not 1 <= count <= limits.prompts:
            raise refuse("prompt", f"expected 1..{limits.prompts} prompts, found {count}")
        check_max("logprobs", self.logprobs, limits.logprobs)
        if self.best_of not in (None, self.n or 1):
            problem = f"expected the value of n, found {self.best_of}; leave it out, and use n"
            raise unsupported("best_of", problem)
        self.check_length()
        if self.suffix is not None and self.echo:
            problem = "expected no echo with a suffix, found true; leave one out"
            raise unsupported("echo", problem)
        if self.stream and self.echo and self.logprobs is not None:
            problem = "expected stream: false with echo and logprobs, found true; do not stream"
            raise unsupported("logprobs", problem)

    def check_length(self) -> None:
        """Raise ``ApiError`` if the request wants no text at all."""
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens", "expected at least 1, or echo: true with 0; found 0")

    def prepare(
        self, prompts: Sequence[list[int]], tokenizer: Tokenizer, shared_fields: dict[str, Any]
    ) -> PreparedRequest:
        """Return the engine's input and the builder of the reply.

        Args:
            prompts: token ids of each of :meth:`prompts`.
            tokenizer: tokenizer of the model.
            shared_fields: fields that are equal in the reply and in every chunk.
        """
        max_tokens = _MAX_TOKENS if self.max_tokens is None else self.max_tokens
        echoed = self.prompts() if self.echo else []
        echoes = [prompt_text(tokenizer, prompt) for prompt in echoed]
        params = self.params(
            max(1, max_tokens),  # the engine generates at least one token
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            guide=self.guide(),
        )
        reply = CompletionReply(
            self, shared_fields, TokenTexts(tokenizer), echoes, max_tokens == 0, prompts
        )
        return PreparedRequest(EngineInputs(prompts, params), reply)


@dataclass
class CompletionReply:
    """Builder of the reply to a request of ``/v1/completions``, whole or in chunks."""

    request: CompletionRequest
    shared_fields: dict[str, Any]  # fields that are equal in the reply and in every chunk
    texts: TokenTexts
    echoes: Sequence[str]  # texts of the prompts if the field ``echo`` is set, otherwise empty
    echo_only: bool  # whether the reply leaves out the generated token (max_tokens is 0)
    prompts: Sequence[Sequence[int]] = ()  # token ids of each prompt
    # For each sample's index, the counter that says where each generated token begins in its text.
    _offsets: dict[int, TokenOffsets] = field(default_factory=dict)

    def __post_init__(self) -> None:
        head = {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time())}
        self.shared_fields = {**head, **self.shared_fields}
        self.n = self.request.n or 1

    def start(self) -> list[dict[str, Any]]:
        """Return one chunk per sample with the prompt's text, if ``echo`` is set."""
        texts = [echo for echo in self.echoes for _ in range(self.n)]
        return [self._chunk(index, text) for index, text in enumerate(texts)]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return one chunk per sample that has new tokens."""
        chunks = list[dict[str, Any]]()
        if self.echo_only:
            return chunks
        for index, sample_pieces in by_sample(pieces):
            text = "".join(piece.text for piece in sample_pieces)
            reports = [piece.logprobs for piece in sample_pieces]
            chunk = self._chunk(index, text, self._logprobs(reports, index))
            if self.request.leaps:
                chunk["choices"][0]["leaps"] = leaps(sample_pieces)
            if (done := sample_pieces[-1].completion) is not None:
                chunk["choices"][0] |= {
                    "finish_reason": done.finish_reason,
                    "stop_reason": done.stop_reason,
                }
            chunks.append(chunk)
        return chunks

    def record(self, pieces: Sequence[Piece]) -> None:
        """Do nothing with a step's new tokens: :meth:`whole` reads the finished samples instead."""

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the last chunks: the end of each sample if ``echo_only``, and the token counts."""
        chunks = list[dict[str, Any]]()
        if self.echo_only:
            chunks = [self._chunk(index, "", None, "length") for index in range(len(done))]
        if self.request.include_usage:
            chunks.append({**self.shared_fields, "choices": [], "usage": self._usage(done)})
        return chunks

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(done)]
        return {**self.shared_fields, "choices": choices, "usage": self._usage(done)}

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        counts = usage(done, self.n)
        if self.echo_only:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return counts

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        echo = self.echoes[index // self.n] if self.echoes else ""
        reports: list[Any] = []
        if self.echoes:
            first, *known = done.prompt_logprobs or [None]
            reports += [{done.prompt_token_ids[0]: first}, *known]
        if not self.echo_only:
            reports += done.logprobs or []
        return {
            "index": index,
            "text": echo if self.echo_only else echo + done.text,
            "logprobs": self._logprobs(reports, index),
            "finish_reason": "length" if self.echo_only else done.finish_reason,
            "stop_reason": None if self.echo_only else done.stop_reason,
            "seed": done.seed,
        }

    def _logprobs(self, reports: Sequence[Any], index: int) -> dict[str, Any] | None:
        """Return the field ``logprobs`` of a choice, or ``None`` if it was not requested.

        Args:
            reports: log-probabilities by token id, for each token of the choice.
            index: index of the choice's sample.
        """
        if self.request.logprobs is None:
            return None
        tokens = [next(iter(report)) for report in reports]
        tokenizer = self.texts.tokenizer
        name = self.texts.name
        number = index // self.n
        offsets = list[int]()
        if self.echoes:
            offsets = prompt_offsets(tokenizer, name, self.request.prompts()[number])
        if index not in self._offsets:
            echo = self.echoes[number] if self.echoes else ""
            self._offsets[index] = output_offsets(tokenizer, name, self.prompts[number], len(echo))
        for token in tokens[len(offsets) :]:
            offsets.append(self._offsets[index].push(token))
        return {
            "tokens": [name(token) for token in tokens],
            "token_logprobs": [report[next(iter(report))] for report in reports],
            "top_logprobs": [self._top_logprobs(report) for report in reports],
            "text_offset": offsets,  # where each token begins in the text, in characters
        }

    def _top_logprobs(self, report: Report) -> dict[str, float] | None:
        """Return the log-probabilities at one position, by the texts of the tokens.

        They are those of the likeliest tokens and of the token in the text; ``None`` for the first
        token of a prompt.

        Among tokens of equal text, the largest log-probability is returned.
        """
        if None in report.values():
            return None  # the first token of a prompt has no log-probability
        actual = next(iter(report))
        likeliest = sorted(report, key=lambda token: -report[token])[: self.request.logprobs]
        if actual not in likeliest:
            likeliest.append(actual)
        likeliest.sort(key=lambda token: report[token])
        return {self.texts.name(token): report[token] for token in likeliest}

    def _chunk(
        self, index: int, text: str, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**self.shared_fields, "choices": [choice]}
        if self.request.include_usage:
            chunk["usage"] = None
        return chunk
