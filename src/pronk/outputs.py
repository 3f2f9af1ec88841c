"""What a request gives back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import exp
from typing import Any

from pronk.engine.request import FinishReason, Request, Token
from pronk.engine.stats import Stats

__all__ = ["Choice", "Completion", "Piece"]


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text: the generated text, without end-of-text tokens and stop strings.
        token_ids: the generated tokens, the one that ended the text included.
        finish_reason: ``"stop"`` (end of text, stop token or stop string) or ``"length"``.
        stop_reason: the token id or the string that ended the text.
        seed: the seed that gives this completion again.
        prompt_token_ids: the prompt as the model saw it.
        logprobs: per generated token ``{token id: log-probability}`` of the token and of the likeliest ones, before
            the request's processors; if asked for.
        prompt_logprobs: the same for the prompt; its first token has none.
        stats: counts and times.
        others: samples 2..n of the same prompt.
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
        """Plain JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"stats": self.stats.to_dict(), "others": [other.to_dict() for other in self.others]}

    def beside(self, others: Iterable[Completion]) -> Completion:
        """The same, with further samples of its prompt."""
        return replace(self, others=tuple(others))

    @classmethod
    def of(cls, request: Request, others: tuple[Completion, ...] = ()) -> Completion:
        """The result of a request that has ended."""
        if request.finish_reason is None:
            msg = "the request has not ended"
            raise AssertionError(msg)
        params = request.params
        return cls(
            text=request.output_text,
            token_ids=request.output,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            seed=request.seed,
            prompt_token_ids=list(request.prompt),
            logprobs=None if params.logprobs is None else list(request.logprobs),
            # Later samples start from the first one's cache and never see the prompt's logits.
            prompt_logprobs=None
            if params.prompt_logprobs is None
            else list((request.parent or request).prompt_logprobs),
            stats=request.stats,
            others=others,
        )


@dataclass(frozen=True)
class Choice:
    """How likely a model finds each of some texts.

    Attributes:
        options: the texts.
        logprobs: of each, the sum of the log-probabilities of its tokens, natural logarithm, at most 0.
    """

    options: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Of each, among these texts; their sum is 1."""
        most = max(self.logprobs)
        shares = [exp(value - most) for value in self.logprobs]
        return tuple(share / sum(shares) for share in shares)

    @property
    def best(self) -> str:
        """The likeliest, of equals the first."""
        return self.options[self.logprobs.index(max(self.logprobs))]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
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
        token_id: the token.
        text: text that became final with it: may be empty (half a character, the possible start of a stop string),
            or more than the token's own.
        source: the name of the drafter whose accepted guess the token was; ``None`` if it was none.
        step: number of the pass of the model that it came with, from 0.
        index: which of the ``n`` samples it belongs to.
        logprobs: of it and the likeliest, as :attr:`Completion.logprobs` has them.
        completion: the finished sample, with its last token.
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
        """Whether the token was an accepted guess."""
        return self.source is not None

    @classmethod
    def of(cls, token: Token, index: int, request: Request, *, last: bool) -> Piece:
        """A request's token, with the finished sample if it is its last."""
        done = Completion.of(request) if last else None
        return cls(token.token_id, token.text, token.source, token.step, index, token.logprobs, done)
