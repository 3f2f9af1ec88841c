"""State of one request: options, tokens, KV block table, output and statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, Literal, NamedTuple

from pronk.base.arrays import Array
from pronk.cache.blocks import BlockTable
from pronk.drafting.ledger import RequestLedger
from pronk.drafting.proposer import Capabilities, Proposer
from pronk.engine.pooling import HiddenPooler
from pronk.engine.stats import DecisionTrace, Stats
from pronk.models.adapters import Adapter, cache_salt
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.text.chat.answers import RepeatedCalls
from pronk.text.stream import TextStream

FinishReason = Literal["stop", "length"]


class Token(NamedTuple):
    """One generated token.

    Attributes:
        token_id: id of the token.
        text: text to deliver with this token. It is empty while the text may still change, for
            example in the middle of a character; a later token then includes it.
        source: drafter of an accepted draft token; "guide" for a forced token; else ``None``.
        step: number, from 0, of the request's decoding step that produced the token.
        logprobs: ``{token id: log-probability}``; ``None`` if not requested.
    """

    token_id: int
    text: str
    source: str | None
    step: int
    logprobs: dict[int, float] | None


class AdmissionRefusal(NamedTuple):
    """Why a waiting request could not start: the state of the prefix cache when blocks were short.

    While this state is unchanged and blocks are short, the scheduler does not look up the prefix
    again.
    """

    cached_blocks: list[int]  # KV blocks of the request's longest cached prefix
    # prefix-cache key of the text's first block that was not cached; empty if there is none
    next_digest: bytes
    cache_version: int  # ``PagedCache.version``; increases when the KV blocks are reallocated


@dataclass
class Queueing:
    """Data by which the scheduler orders waiting and running requests; only the scheduler uses it.

    Times are seconds of the scheduler's clock.
    """

    arrival: int = 0  # 0, 1, … in the order in which requests were added to the scheduler
    # Time at which the request began to wait. ``Scheduler.add`` sets it, unless the caller has set
    # an earlier time at which it received the request.
    since: float | None = None
    # 0, 1, … in order of first starts; ``None`` before the first start
    start_order: int | None = None
    # End of the turn, if the request has one: a time in which other tenants cannot preempt it.
    turn_end: float = -inf
    turn_start: int = 0  # number of generated tokens at the beginning of the turn
    # number of generated tokens that the tenant's counter of served tokens includes
    num_charged: int = 0
    # set if the last attempt to start the request failed for lack of blocks
    refusal: AdmissionRefusal | None = None


@dataclass
class Speculation:
    """A request's drafter, with its state and the measurements of its draft tokens.

    Attributes:
        capabilities: those of the proposer; the defaults without one.
    """

    proposer: Proposer[Any] | None  # ``None`` after :meth:`drop_proposer`
    capabilities: Capabilities = field(init=False)
    state: Any = None  # the proposer's state; set if ``started``
    started: bool = False  # whether ``Proposer.start`` has been called
    ledger: RequestLedger = field(default_factory=RequestLedger)
    # record of each decision, for ``pronk explain``; else ``None``
    trace: DecisionTrace | None = None

    def __post_init__(self) -> None:
        self.capabilities = Capabilities() if self.proposer is None else self.proposer.capabilities

    def drop_proposer(self) -> None:
        """Go on without the proposer, which has raised an exception."""
        self.proposer = None
        self.capabilities = Capabilities()


@dataclass
class RequestResult:
    """Text that a request has generated so far, and why it ended."""

    detokenizer: TextStream  # makes text of the output tokens and looks for stop strings
    # Detects a tool call that repeats an earlier one, which ends the text; ``None`` without tools.
    calls: RepeatedCalls | None = None
    text: str = ""  # text of the output tokens so far
    # for each output token, whether it was an accepted draft token or forced by a guide
    from_draft: list[bool] = field(default_factory=list)
    # for each output token and each prompt token, the log-probabilities in nats by token id
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    # tokens that the caller has not read yet
    undelivered: deque[Token] = field(default_factory=deque)
    finish_reason: FinishReason | None = None  # ``None`` while running or after an error
    stop_reason: str | int | None = None  # token id or stop string that ended the text
    error: Exception | None = None  # why the request failed

    @property
    def ended(self) -> bool:
        """Whether the request has finished or failed."""
        return self.finish_reason is not None or self.error is not None

    def finish(self, finish_reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Mark the text as complete.

        ``stop_reason`` is the token id or stop string that ended the text, as in
        :class:`Completion`.
        """
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason

    def fail(self, error: Exception) -> None:
        """End the text with an error, replacing any finish reason."""
        self.error = error
        self.finish_reason = None
        self.stop_reason = None


@dataclass(eq=False)
class Request:
    """One prompt and its output; created by :class:`~pronk.engine.request_factory.RequestFactory`.

    ``tokens`` is the prompt followed by the output. The KV cache holds its first
    ``block_table.length`` tokens. The rest is *pending*, that is, still to be computed: tokens of
    the prompt, or only the last token, which is the root of the next draft. The sampler and the
    proposer read ``tokens`` and must not change this list.

    Attributes:
        prompt: token ids of the prompt.
        tokens: token ids of the text so far.
        params: sampling options.
        seed: seed of this sample; those of a prompt's later samples differ from ``params.seed``.
        sampler: chooses the request's tokens.
        speculation: the request's drafter, its state and its measurements.
        result: text, tokens to deliver, and the reason of the end or the error.
        stop_token_ids: token ids that end the text.
        parent: first sample of the same prompt, if this request is a later sample; both may share
            KV blocks.
        priority: scheduling priority; higher values are scheduled first.
        deadline: scheduler's time (``perf_counter``) at which an unfinished request fails.
        salt: part of the keys of the prefix cache: only requests with equal salts share blocks.
        adapter: adapter of the model that computes this request; ``None``: the model alone.
        tenant: client name for fair scheduling among requests of equal priority.
        branch_positions: lengths, ascending, of the prefixes that a later prompt of the same
            conversation may share (:mod:`pronk.text.chat.branches`). A recurrent model stores its
            state there. Empty for other models and for prompts that are no conversation.
        pooler: set if the request computes an embedding of its prompt instead of generating tokens.
        paused: whether the request must wait because its caller has too many unread tokens.
        aborted: whether the caller has cancelled the request.
        queueing: data of the scheduler.
        block_table: KV blocks of the text.
        digests: keys in the prefix cache of the text's first full blocks.
        stats: counts and durations.
        start_time: seconds on the engine's clock at ``Engine.add``.
    """

    prompt: Sequence[int]
    tokens: list[int]
    params: SamplingParams
    seed: int
    sampler: Sampler
    speculation: Speculation
    result: RequestResult
    stop_token_ids: frozenset[int]
    parent: Request | None = None
    priority: int = 0
    deadline: float | None = None
    salt: bytes = b""
    adapter: Adapter | None = None
    tenant: str = ""
    branch_positions: tuple[int, ...] = ()
    pooler: HiddenPooler | None = None
    paused: bool = field(default=False, init=False)
    aborted: bool = field(default=False, init=False)
    queueing: Queueing = field(default_factory=Queueing, init=False)
    block_table: BlockTable = field(default_factory=BlockTable, init=False)
    digests: list[bytes] = field(default_factory=list, init=False)
    stats: Stats = field(default_factory=Stats, init=False)
    start_time: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.stats.prompt_tokens = len(self.prompt)

    @cached_property
    def cache_salt(self) -> bytes:
        """Salt of the keys of prefix caches: only requests with equal salts share cached blocks.

        It depends on ``salt`` and the adapter (:func:`~pronk.models.adapters.cache_salt`), which
        do not change after the request is added to an engine.
        """
        return cache_salt(self.adapter, self.salt)

    @property
    def output(self) -> list[int]:
        """Token ids after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Numbers (from 1) of the layers whose outputs the drafter or the embedding needs."""
        return self.speculation.capabilities.hidden if self.pooler is None else (self.pooler.layer,)

    @property
    def needs_logits(self) -> bool:
        """Whether the drafter needs the target's logits of this step."""
        speculation = self.speculation
        capabilities = speculation.capabilities
        if capabilities.logits and capabilities.observes_all_steps:
            return True
        return bool(speculation.ledger.proposers) and speculation.ledger.needs_logits

    @property
    def needs_draft_slots(self) -> bool:
        """Whether to reserve KV slots for draft tokens.

        True if the drafter can propose, and at least two more tokens may be generated: a draft
        token and the bonus token.
        """
        proposer = self.speculation.proposer
        if proposer is None or not proposer.capabilities.proposes:
            return False
        return self.num_remaining > 1

    @property
    def ended(self) -> bool:
        """Whether the request has finished or failed."""
        result = self.result
        return result.finish_reason is not None or result.error is not None

    @property
    def has_new_turn(self) -> bool:
        """Whether the request has a turn in which it has generated no token yet.

        The scheduler gives a turn to one request of a tenant that has waited for too long
        (``Scheduler.max_wait``, in seconds). Other tenants cannot preempt a request during its
        turn, nor after the end of the turn until the request has generated a token in it.
        """
        return self.queueing.turn_end > -inf and self.num_generated == self.queueing.turn_start

    def has_turn(self, now: float) -> bool:
        """Return whether the request has a turn: other tenants cannot preempt it at ``now``.

        A turn ends ``Scheduler.max_wait`` seconds after its start, but not before the request has
        generated a token. ``now`` is in seconds of the scheduler's clock.
        """
        return self.queueing.turn_end > now or self.has_new_turn

    @property
    def is_startable(self) -> bool:
        """Whether the scheduler may start the request: it has not ended and is not paused."""
        return not self.ended and not self.paused

    @property
    def num_pending(self) -> int:
        """Number of tokens of the text without KV rows; at least 1."""
        return len(self.tokens) - self.block_table.length

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self.params.max_tokens - (len(self.tokens) - len(self.prompt))

    @property
    def computes_prompt_logprobs(self) -> bool:
        """Whether this request computes ``prompt_logprobs``.

        Later samples of the prompt copy its result.
        """
        return (
            self.params.prompt_logprobs is not None
            and not self.num_generated
            and self.parent is None
        )

    @property
    def has_samples(self) -> bool:
        """Whether other samples of the prompt start from this request's KV cache."""
        return self.params.n > 1 and self.parent is None

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether every token of the prompt has to be computed, even if it is in the KV cache."""
        return self.computes_prompt_logprobs or (
            self.pooler is not None and self.pooler.needs_all_rows
        )

    def add_hidden(self, rows: Array) -> None:
        """Add outputs of the last layer, ``[rows, hidden]``, to the embedding of the prompt.

        The rows are those of the next prompt tokens. The last token of the prompt ends the request.
        """
        assert self.pooler is not None
        if self.pooler.add(self.block_table.length, rows):
            self.result.finish("length")

    def append(self, token: int, *, source: str | None, logprobs: dict[int, float] | None) -> bool:
        """Append a token to the text; return False if it ends the request.

        The arguments are those of :class:`Token`.
        """
        result = self.result
        self.tokens.append(token)
        result.from_draft.append(source is not None)
        self.stats.generated_tokens += 1
        if logprobs is not None:
            result.logprobs.append(logprobs)
        is_end = token in self.stop_token_ids
        text, stop = result.detokenizer.push(token, is_end=is_end)
        if is_end:
            result.finish("stop", token)
        elif self.num_remaining <= 0:
            result.finish("length")
        if result.calls is not None and stop is None and self._repeats_call(text, token):
            result.finish("stop")
        if result.finish_reason and stop is None:
            rest, stop = result.detokenizer.flush()
            text += rest
        if stop is not None:
            result.finish("stop", stop)
        result.text += text
        if result.finish_reason and self.params.prediction:
            assert not isinstance(self.params.prediction, str), "expected token ids"
            self.stats.count_prediction(self.params.prediction, self.output)
        result.undelivered.append(Token(token, text, source, len(self.stats.steps), logprobs))
        return result.finish_reason is None

    def resume(self, tokens: Iterable[tuple[int, str | None, dict[int, float] | None]]) -> None:
        """Continue a request after tokens that another replica has generated and delivered.

        Each is a tuple ``(token id, source, logprobs)``.
        """
        for token, source, logprobs in tokens:
            self.sampler.advance(token)
            self.append(token, source=source, logprobs=logprobs)
            self.sampler.commit_tokens(1)
        self.result.undelivered.clear()

    def _repeats_call(self, text: str, token: int) -> bool:
        """Return whether a new token completes a call that repeats an earlier one of the text."""
        if self.result.calls is None or self.result.finish_reason is not None:
            return False
        is_repeated = self.result.calls.push(text, token)
        return is_repeated and self.num_generated >= self.params.min_tokens
