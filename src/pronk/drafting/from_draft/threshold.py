"""Threshold decoding: end a chain where the drafter's confidence falls below an adaptive threshold.

``c_i`` is the product of the confidences of the first ``i`` draft tokens of a chain
(:class:`~pronk.sampling.draft_token.DraftToken`). A chain ends at the first token whose ``c_i`` is
below the request's threshold. If all its draft tokens are accepted, the threshold falls by
``boost``. Otherwise the threshold becomes the mean of itself and the ``c_i`` of the first rejected
token.

This is the rule in the code of the survey *How to make LLMs go fast* (section "Threshold
decoding"); ``docs/methods/threshold.md`` has the formulas. The text of the survey takes the ``c_i``
of the last accepted token, with ``c_0 = 1`` (``toward="accepted"``). That makes chains shorter: the
measured speed is within 5 % of that of the best fixed length if the drafter is expensive, and 6 to
23 % lower if a draft token costs 1.3 % of a forward pass of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

from pronk.base.checks import check_choice, check_integer, check_number
from pronk.base.errors import OptionError
from pronk.base.keywords import known_keywords
from pronk.drafting.from_draft.draft_model import DraftModel
from pronk.drafting.proposer import DraftContext, Drafter, Outcome, Proposer, States, bind_proposer
from pronk.drafting.shared.chain import Chain, Stop, chains_of
from pronk.drafting.shared.common_prefix import common_prefix_length
from pronk.drafting.shared.composite import Composite, check_wraps_chains
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.drafting.target import Target
from pronk.sampling.tree import TokenTree


class _LastChain(NamedTuple):
    """The chain that was proposed last for a request, to be compared with what was accepted."""

    root_position: int  # position of the chain's root in the text, from 0
    tokens: Sequence[int]  # the chain's draft tokens
    # c_0 = 1, c_1, c_2, …: the product of the confidences of the first i draft tokens
    cumulative_confidence: Sequence[float]


@dataclass
class _ThresholdState:
    """One request's threshold, which changes only when a chain has been verified."""

    threshold: float
    # Stored from the proposal until it is verified, because trees hold no confidences. Later
    # proposals do not depend on it, so it is left out of comparisons.
    last_chain: _LastChain | None = field(default=None, compare=False)


@known_keywords
@dataclass(frozen=True)
class Threshold(Composite):
    """Options of threshold decoding.

    Attributes:
        parts: the inner drafter, ``draft_model`` by default. Its own options that end chains are
            ignored.
        max_tokens: maximum number of draft tokens of a chain, 1..64.
        threshold: initial threshold, within ``lowest .. highest``.
        boost: decrease of the threshold when all tokens were accepted, 0..1.
        lowest: smallest threshold, 0..1.
        highest: largest threshold, 0..1.
        toward: which c_i the threshold moves towards after a rejection: that of the first rejected
            token (``"rejected"``) or of the last accepted token (``"accepted"``).
    """

    name = "threshold"

    parts: tuple[Drafter, ...] = field(default_factory=lambda: (DraftModel(),))
    max_tokens: int = 16
    threshold: float = 0.4
    boost: float = 0.1
    lowest: float = 0.05
    highest: float = 0.95
    toward: str = "rejected"

    def __post_init__(self) -> None:
        check_wraps_chains(self)
        super().__post_init__()
        check_integer(f"{self.name}: max_tokens", self.max_tokens, 1, 64)
        for option in ("boost", "lowest", "highest"):
            check_number(f"{self.name}: {option}", getattr(self, option), 0, 1)
        if self.lowest > self.highest:
            msg = (
                f"{self.name}: lowest: expected at most highest = {self.highest}, found "
                f"{self.lowest}"
            )
            raise OptionError(msg)
        check_number(f"{self.name}: threshold", self.threshold, self.lowest, self.highest)
        check_choice(f"{self.name}: toward", self.toward, ("accepted", "rejected"))

    def as_chains(self) -> Self:
        return self

    def bind(self, target: Target) -> ThresholdProposer:
        return ThresholdProposer(self, bind_proposer(self.parts[0], target))


class ThresholdProposer(Proposer[States]):
    """Proposes the inner drafter's chains, each ended by the request's threshold."""

    name = Threshold.name

    def __init__(self, options: Threshold, inner: Proposer[Any]) -> None:
        self.set_parts([inner])
        self.options = options
        self.inner = inner
        self.capabilities = inner.capabilities
        self._inner_chains = chains_of(inner)

    @property
    def chain_label(self) -> str:
        return self.inner.chain_label

    def chain_costs(self, context: DraftContext[States], costs: StepCosts) -> ChainCosts | None:
        inner = self.inner.chain_costs(context.with_state(context.state[0]), costs)
        # The wrapper's rule and limit replace those of the inner drafter.
        return inner if inner is None else inner._replace(max_tokens=self.options.max_tokens)

    def score_history(self, context: DraftContext[States]) -> bool:
        return self.inner.score_history(context.with_state(context.state[0]))

    def start(self, prompt: Sequence[int]) -> States:
        return (*super().start(prompt), _ThresholdState(self.options.threshold))

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        return [chain.tree() for chain in self.chains(contexts)]

    def chains(
        self, contexts: Sequence[DraftContext[States]], stops: Sequence[Stop] | None = None
    ) -> list[Chain]:
        """Return chains that end by each request's threshold, or by a rule of ``stops``.

        The last chain of each request is remembered until :meth:`observe`.
        """

        def is_complete(number: int, chain: Chain) -> bool:
            is_below = chain.cumulative_confidence[-1] < contexts[number].state[1].threshold
            return is_below or (stops is not None and stops[number](chain))

        own_stops = [partial(is_complete, number) for number in range(len(contexts))]
        most = self.options.max_tokens
        inner = [
            each.with_state(each.state[0], max_depth=min(each.max_depth, most)) for each in contexts
        ]
        chains = self._inner_chains(inner, own_stops)
        for context, chain in zip(contexts, chains, strict=True):
            confidences = (1.0, *chain.cumulative_confidence)
            root_position = len(context.tokens) - 1
            context.state[1].last_chain = _LastChain(
                root_position, tuple(chain.tokens), confidences
            )
        return chains

    def observe(self, outcome: Outcome[States]) -> None:
        super().observe(outcome)
        options = self.options
        state = outcome.state[1]
        chain = state.last_chain
        if chain is None or outcome.position != chain.root_position:
            return
        # the engine may have cut the end of the chain
        num_verified = outcome.tree.num_matched(chain.tokens)
        if not num_verified:
            return
        accepted = [outcome.tree.tokens[node] for node in outcome.path]
        num_accepted = common_prefix_length(accepted, chain.tokens, 0)
        if num_accepted < num_verified:
            index = num_accepted + 1 if options.toward == "rejected" else num_accepted
            state.threshold = (state.threshold + chain.cumulative_confidence[index]) / 2
        else:
            state.threshold -= options.boost
        state.threshold = min(max(state.threshold, options.lowest), options.highest)
