"""One request: its tokens, its place in the cache, and what it has produced so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from pronk.engine.decision_trace import DecisionTrace
from pronk.engine.stats import Stats
from pronk.kv_cache.blocks import BlockTable
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.speculation.proposer import Capabilities, Proposer
from pronk.speculation.request_budget import RequestBudget

__all__ = ["AdmissionRefusal", "FinishReason", "Request", "TextOutput", "Token"]

FinishReason = Literal["stop", "length"]


class TextOutput(Protocol):
    """Turns token ids into text; see :class:`pronk.tokenization.stream.TextStream`."""

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
        source: whose accepted guess it was; ``None`` if it was none.
        step: number of the step that it came with, from 0.
        logprobs: of it and the likeliest, if asked for.
    """

    token_id: int
    text: str
    source: str | None
    step: int
    logprobs: dict[int, float] | None


class AdmissionRefusal(NamedTuple):
    """What the cache had of a request's text when there was no room for the rest of it.

    Attributes:
        found: the blocks of its beginning.
        following: the digest of the block behind them; empty if there is none.
        version: of the cache; another one has other blocks.
    """

    found: list[int]
    following: bytes
    version: int


@dataclass(eq=False)
class Request:
    """A prompt being continued; :class:`~pronk.engine.request_factory.RequestFactory` makes them.

    ``tokens`` is all that is certain: the prompt, then the output. Its first ``block_table.length`` tokens are in the
    cache, the rest is *pending*: a chunk of the prompt, or the one token that the next pass starts from. The list is
    the only copy of the text: the chooser and the guesser look at it and do not change it.

    Attributes:
        prompt: token ids, as they were given.
        tokens: ids of the prompt and of the output so far.
        params: what was asked for.
        seed: of its choices.
        proposer: who guesses; ``None`` once it has raised.
        sampler: who chooses its tokens, after ``tokens``.
        text: what its tokens are read by.
        stop_token_ids: token ids that end it.
        parent: an earlier request of the same prompt, whose cache it may start from.
        priority: those with a higher one go first.
        deadline: when it ends with an error if it has not ended by then, by ``perf_counter``; ``None`` is never.
        salt: only requests with the same one share what the cache has of their texts.
        tenant: whose it is; among requests of one priority those of different tenants start by turns.
        arrival: its number among those that were added.
        start: its number among those that have started; ``None`` before it has.
        accounted: so many of its generated tokens are in its tenant's account.
        block_table: where its keys and values are.
        digests: of its text's blocks, as far as somebody has asked for them (:mod:`pronk.kv_cache.prefix`).
        refused: why it has not started yet; ``None`` if it has not tried.
        draft_state: what the guesser has started for it, if it is ``drafting``.
        guessed: of each generated token, whether it was an accepted guess.
        logprobs: of the generated tokens.
        prompt_logprobs: of the prompt's.
        output_text: text that is final.
        pieces: tokens that nobody has fetched yet.
        finish_reason: why it ended well, if it did.
        stop_reason: the token or text that ended it.
        error: why it ended badly, if it did.
        aborted: whether nobody wants it any longer.
        request_budget: what guessing has cost it and brought it; ``None`` before it was guessed for.
        decision_trace: what was decided for it, if anybody wants to know.
        stats: what it has cost.
        began: when it was added, by the engine's clock.
    """

    prompt: Sequence[int]
    tokens: list[int]
    params: SamplingParams
    seed: int
    proposer: Proposer[Any] | None
    sampler: Sampler
    text: TextOutput
    stop_token_ids: frozenset[int]
    parent: Request | None = None
    priority: int = 0
    deadline: float | None = None
    salt: bytes = b""
    tenant: str = ""
    arrival: int = field(default=0, init=False)
    start: int | None = field(default=None, init=False)
    accounted: int = field(default=0, init=False)
    block_table: BlockTable = field(default_factory=BlockTable, init=False)
    digests: list[bytes] = field(default_factory=list, init=False)
    refused: AdmissionRefusal | None = field(default=None, init=False)
    draft_state: Any = field(default=None, init=False)
    drafting: bool = field(default=False, init=False)
    guessed: list[bool] = field(default_factory=list, init=False)
    logprobs: list[dict[int, float]] = field(default_factory=list, init=False)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list, init=False)
    output_text: str = field(default="", init=False)
    pieces: deque[Token] = field(default_factory=deque, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: str | int | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    aborted: bool = field(default=False, init=False)
    request_budget: RequestBudget | None = field(default=None, init=False)
    decision_trace: DecisionTrace | None = field(default=None, init=False)
    stats: Stats = field(default_factory=Stats, init=False)
    began: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.stats.prompt_tokens = len(self.prompt)

    @property
    def output(self) -> list[int]:
        """Generated token ids."""
        return self.tokens[len(self.prompt) :]

    @property
    def capabilities(self) -> Capabilities:
        """Optional behaviour of the request's drafter."""
        return Capabilities() if self.proposer is None else self.proposer.capabilities

    @property
    def draft_tokens(self) -> bool:
        """Whether a guess may be of use: somebody makes some, and more than one token may still come."""
        return self.proposer is not None and self.proposer.capabilities.proposes and self.remaining > 1

    @property
    def ended(self) -> bool:
        """Whether the request has finished or failed."""
        return self.finish_reason is not None or self.error is not None

    @property
    def num_pending(self) -> int:
        """Certain tokens that the cache does not hold yet; at least 1."""
        return len(self.tokens) - self.block_table.length

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.params.max_tokens - self.num_generated

    @property
    def reports_prompt(self) -> bool:
        """Whether logits at the prompt's tokens are wanted; a further sample leaves them to the first one."""
        return self.params.prompt_logprobs is not None and not self.num_generated and self.parent is None

    def append(self, token: int, *, source: str | None, logprobs: dict[int, float] | None) -> bool:
        """The next token is certain. Returns whether the request goes on; if not, nothing may follow.

        Args:
            token: its id.
            source: whose guess it was, if it was one.
            logprobs: of it and others, if they are asked for.
        """
        self.tokens.append(token)
        self.guessed.append(source is not None)
        self.stats.generated_tokens += 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
        text, stop = ("", None) if token in self.stop_token_ids else self.text.push(token)
        if token in self.stop_token_ids:
            self._finish("stop", token)
        elif self.remaining <= 0:
            self._finish("length", None)
        if self.finish_reason and stop is None:
            rest, stop = self.text.flush()
            text += rest
        if stop is not None:
            self._finish("stop", stop)
        self.output_text += text
        self.pieces.append(Token(token, text, source, len(self.stats.steps), logprobs))
        return self.finish_reason is None

    def resume(self, tokens: Iterable[tuple[int, str | None, dict[int, float] | None]]) -> None:
        """Stand behind tokens that this request has chosen before, elsewhere, and that have been given out.

        Args:
            tokens: each with who guessed it, and what was reported of it.
        """
        for token, source, logprobs in tokens:
            self.sampler.advance(token)
            self.append(token, source=source, logprobs=logprobs)
            self.sampler.commit(1)
        self.pieces.clear()

    def fail(self, error: Exception) -> None:
        """It ends with an error, and not well besides."""
        self.error, self.finish_reason, self.stop_reason = error, None, None

    def _finish(self, reason: FinishReason, cause: str | int | None) -> None:
        self.finish_reason, self.stop_reason = reason, cause
