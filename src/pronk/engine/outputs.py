"""Results of requests."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from pronk.engine.request import FinishReason, Request, Token
from pronk.engine.stats import Stats
from pronk.kernels.exact_math import exp


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text: generated text, without end-of-text tokens and stop strings.
        token_ids: generated token ids, including the end-of-text or stop token.
        finish_reason: ``"stop"`` (end of text, stop token or stop string) or ``"length"``.
        stop_reason: token id or string that ended the text.
        seed: seed that reproduces this completion.
        prompt_token_ids: token ids of the prompt.
        logprobs: for each generated position, log-probabilities by token id, of the generated token
            and the most likely tokens, before logits processors; ``None`` if not requested.
        prompt_logprobs: log-probabilities in the same form for each prompt token; ``None`` for the
            first token.
        stats: counts of tokens and draft tokens, durations, and the counts and times of each
            decoding step.
        others: in the first of ``n`` samples of a prompt, the later samples; else empty.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    prompt_token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    prompt_logprobs: list[dict[int, float] | None] | None
    stats: Stats
    others: tuple[Completion, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the completion as JSON values."""
        return vars(self) | {
            "stats": self.stats.to_dict(),
            "others": [other.to_dict() for other in self.others],
        }

    @classmethod
    def of(cls, request: Request, others: tuple[Completion, ...] = ()) -> Completion:
        """Return the completion of a finished request.

        ``others`` are the later samples of its prompt.
        """
        assert request.result.finish_reason is not None, (
            "expected a finished request, found one without finish_reason"
        )
        params = request.params
        first = request.parent or request
        return cls(
            text=request.result.text,
            token_ids=request.output,
            finish_reason=request.result.finish_reason,
            stop_reason=request.result.stop_reason,
            seed=request.seed,
            prompt_token_ids=list(request.prompt),
            logprobs=None if params.logprobs is None else list(request.result.logprobs),
            # Only the first sample of a prompt (the parent) computes prompt logits; later samples
            # share its KV blocks.
            prompt_logprobs=None
            if params.prompt_logprobs is None
            else list(first.result.prompt_logprobs),
            stats=request.stats,
            others=others,
        )


@dataclass(frozen=True)
class Choice:
    """Log-probabilities of the texts that :meth:`~pronk.llm.LLM.choose` compares.

    Attributes:
        options: compared texts.
        logprobs: for each option, the sum of the natural log-probabilities of its tokens.
    """

    options: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def probabilities(self) -> tuple[float, ...]:
        """For each option, ``exp(logprob)`` divided by the sum of these over all options."""
        highest = max(self.logprobs)
        weights = exp([logprob - highest for logprob in self.logprobs]).tolist()
        divisor = fsum(weights)
        return tuple(weight / divisor for weight in weights)

    @property
    def best(self) -> str:
        """Most likely option; of equally likely options, the first."""
        return self.options[self.logprobs.index(max(self.logprobs))]

    def to_dict(self) -> dict[str, Any]:
        """Return the options and their probabilities as JSON values."""
        return {
            "options": list(self.options),
            "logprobs": list(self.logprobs),
            "probabilities": list(self.probabilities),
            "best": self.best,
        }


@dataclass(frozen=True)
class Piece:
    """One generated token of a stream.

    Attributes:
        token_id: id of the token.
        text: new text to show. It is empty while the tokens form only a part of a character or may
            begin a stop string; a later token then includes the withheld text.
        source: name of the drafter that proposed the token; ``None`` if the token is not an
            accepted draft token.
        step: number of the decoding step, from 0.
        index: index of the sample, ``0 .. n - 1``.
        logprobs: log-probabilities by token id, like one entry of :attr:`Completion.logprobs`.
        completion: the whole sample, set on its last token only.
    """

    token_id: int
    text: str
    source: str | None = None
    step: int = 0
    index: int = 0
    logprobs: dict[int, float] | None = None
    completion: Completion | None = None

    @property
    def guessed(self) -> bool:
        """Whether the token was an accepted draft token."""
        return self.source is not None

    @classmethod
    def of(cls, token: Token, index: int, request: Request, *, last: bool) -> Piece:
        """Return the piece for a token of ``request``.

        If it is the ``last`` token, include the completion.
        """
        completion = Completion.of(request) if last else None
        return cls(
            token.token_id, token.text, token.source, token.step, index, token.logprobs, completion
        )

    @classmethod
    def stream(
        cls, tokens: Generator[tuple[int, Token, bool]], requests: Sequence[Request]
    ) -> Generator[Piece]:
        """Yield pieces for the ``tokens`` that ``Engine.stream`` yields.

        Closing ends that iterator, too.
        """
        with closing(tokens):
            for index, token, last in tokens:
                yield cls.of(token, index, requests[index], last=last)
