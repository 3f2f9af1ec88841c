"""One request: its tokens, its place in the cache, and what it has produced so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pronk.cache.blocks import BlockTable
from pronk.choosing.chooser import Chooser
from pronk.choosing.params import SamplingParams
from pronk.drafters.base import Drafter
from pronk.engine.stats import Stats
from pronk.errors import PronkError

__all__ = ["FinishReason", "Request", "TextOutput", "Token", "end_ids"]

FinishReason = Literal["stop", "length"]


class TextOutput(Protocol):
    """Turns token ids into text; see :mod:`pronk.text.detokenizer`."""

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that has become final, and the stop string that was completed, if any."""
        ...

    def flush(self) -> tuple[str, str | None]:
        """What was still held back, and the stop string in it, if any."""
        ...


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        token_id: the token.
        text: text that became final with it; may be empty, or more than the token's own.
        guessed: whether it was an accepted guess.
    """

    token_id: int
    text: str
    guessed: bool


@dataclass(eq=False)
class Request:
    """A prompt being continued.

    ``tokens`` is all that is certain: the prompt, then the output. Its first ``table.length`` tokens are in the
    cache, the rest is *pending*: a chunk of the prompt, or the one token that the next pass starts from.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    drafter: Drafter[Any]
    chooser: Chooser
    text: TextOutput
    ends: frozenset[int]
    parent: Request | None = None
    tokens: list[int] = field(default_factory=list)
    guessed: list[bool] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    draft_state: Any = None
    drafting: bool = False
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    output_text: str = ""
    pieces: deque[Token] = field(default_factory=deque)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stats: Stats = field(default_factory=Stats)
    error: PronkError | None = None
    began: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.stats.prompt_tokens = len(self.prompt)

    @property
    def output(self) -> list[int]:
        """Generated token ids."""
        return self.tokens[len(self.prompt) :]

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.finish_reason is not None or self.error is not None

    @property
    def num_pending(self) -> int:
        """Certain tokens that the cache does not hold yet; at least 1."""
        return len(self.tokens) - self.table.length

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.params.max_tokens - (len(self.tokens) - len(self.prompt))

    def append(self, token: int, *, guessed: bool, logprobs: dict[int, float] | None) -> bool:
        """The next token is certain. Returns whether the request goes on; if not, nothing may follow."""
        self.tokens.append(token)
        self.guessed.append(guessed)
        self.stats.generated_tokens += 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
        text, stop = ("", None) if token in self.ends else self.text.push(token)
        if token in self.ends:
            self._finish("stop", token)
        elif self.remaining <= 0:
            self._finish("length", None)
        if self.finish_reason and stop is None:
            rest, stop = self.text.flush()
            text += rest
        if stop is not None:
            self._finish("stop", stop)
        self.output_text += text
        self.pieces.append(Token(token, text, guessed))
        return self.finish_reason is None

    def _finish(self, reason: FinishReason, cause: str | int | None) -> None:
        self.finish_reason, self.stop_reason = reason, cause


def end_ids(params: SamplingParams, eos_ids: Sequence[int]) -> frozenset[int]:
    """The token ids that end a request."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
