"""Threshold decoding: end a chain where the drafter's confidence falls, and adapt the limit.

The rule of the survey *How to make LLMs go fast* (section "Threshold decoding"). With ``c_i`` the product of the
confidences of the first ``i`` tokens, a chain ends at the first token with ``c_i < threshold``. Then, with ``k`` of
them accepted::

    some rejected    threshold ← (threshold + c_(k+1)) / 2     towards the first rejected token
    all accepted     threshold ← threshold - boost             the chain was too short

within ``lowest .. highest``, for each request by itself. For example, from 0.4: ``the`` with 0.75 and ``next`` with 0.5
end the chain at c_2 = 0.375. If only ``the`` is accepted, the threshold becomes 0.3875.

This is the survey's code. The survey's text uses the last accepted token, c_k with c_0 = 1 (``toward="accepted"``).
That gives shorter chains: within 5 % of the best fixed length where the draft is expensive, but not where it is cheap.

*Confidence.* With greedy decoding a confidence is the draft's largest probability, max p. Under the coupled acceptance
rule it is the largest entry of softmax(logits / T + Gumbel noise), with the target's noise at the position. That value
is noisy and is not max p. Under the rejection and block rules it is max p at the request's temperature, which may
exceed the probability of the token drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pronk.checks import check_choice, check_integer, check_number
from pronk.drafters.from_draft._wrapper import WrappedState, Wrapper, WrapperProposer
from pronk.drafters.shared.chain import Chain, ChainProposer, Stop
from pronk.errors import OptionError
from pronk.speculation.proposer import DraftContext, Outcome
from pronk.speculation.target import Target

__all__ = ["Threshold"]


@dataclass
class _Limit:
    """One request's threshold, and its last chain: position of the root, tokens, and products from c_0 on."""

    threshold: float
    root: int = field(default=-1, compare=False)
    tokens: list[int] = field(default_factory=list, compare=False)
    cumulative_confidence: list[float] = field(default_factory=list, compare=False)

    def verified(self, outcome: Outcome[Any]) -> list[int]:
        """Return the verified nodes of the last chain; other drafters may have added or replaced nodes."""
        nodes: list[int] = []
        node: int | None = 0 if outcome.position == self.root else None
        for token in self.tokens:
            node = None if node is None else outcome.tree.child(node, token)
            if node is None:
                break
            nodes.append(node)
        return nodes


@dataclass(frozen=True)
class Threshold(Wrapper):
    """Options of threshold decoding.

    Attributes:
        parts: the drafter whose chains are cut, ``draft_model`` by default; its own limits are not used.
        max_tokens: most tokens of a chain, 1..64.
        threshold: initial threshold, within ``lowest .. highest``.
        boost: decrease of the threshold when all tokens were accepted, 0..1.
        lowest: least threshold, 0..1.
        highest: largest threshold, 0..1.
        toward: the token to which the threshold moves when some were rejected: ``"rejected"`` or ``"accepted"``.
    """

    name = "threshold"

    max_tokens: int = 16
    threshold: float = 0.4
    boost: float = 0.1
    lowest: float = 0.05
    highest: float = 0.95
    toward: str = "rejected"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: max_tokens", self.max_tokens, 1, 64)
        for option in ("boost", "lowest", "highest"):
            check_number(f"{self.name}: {option}", getattr(self, option), 0, 1)
        if self.lowest > self.highest:
            msg = f"{self.name}: lowest: expected at most highest = {self.highest}, found {self.lowest}"
            raise OptionError(msg)
        check_number(f"{self.name}: threshold", self.threshold, self.lowest, self.highest)
        check_choice(f"{self.name}: toward", self.toward, ("accepted", "rejected"))

    def bind(self, target: Target) -> ThresholdProposer:
        """Return the proposer around that of the inner drafter."""
        return ThresholdProposer(self, self.bind_inner(target))


class ThresholdProposer(WrapperProposer[_Limit]):
    """Proposes chains that end at an adaptive threshold."""

    name = Threshold.name

    def __init__(self, options: Threshold, inner: ChainProposer[Any]) -> None:
        super().__init__(inner)
        self.options = options

    @property
    def source(self) -> str:
        """Source of the options."""
        return self.options.source

    def make_own_state(self) -> _Limit:
        """Return the initial threshold."""
        return _Limit(self.options.threshold)

    def chains(self, contexts: Sequence[DraftContext[WrappedState[_Limit]]], stop: Stop | None = None) -> list[Chain]:
        """Return chains that end at the first product of confidences below the request's threshold."""

        def is_complete(number: int, chain: Chain) -> bool:
            low = chain.cumulative_confidence[-1] < contexts[number].state.own.threshold
            return low or (stop is not None and stop(number, chain))

        chains = self.inner.chains(self.inner_contexts(contexts, self.options.max_tokens), is_complete)
        for context, chain in zip(contexts, chains, strict=True):
            limit = context.state.own
            limit.root, limit.tokens, limit.cumulative_confidence = (
                len(context.tokens) - 1,
                chain.tokens,
                [1.0, *chain.cumulative_confidence],
            )
        return chains

    def observe(self, outcome: Outcome[WrappedState[_Limit]]) -> None:
        """Adapt the threshold."""
        super().observe(outcome)
        options, limit = self.options, outcome.state.own
        drafted = limit.verified(outcome)
        if not drafted:
            return
        accepted = len({*drafted} & {*outcome.path})
        if accepted < len(drafted):
            limit.threshold = (
                limit.threshold + limit.cumulative_confidence[accepted + (options.toward == "rejected")]
            ) / 2
        else:
            limit.threshold -= options.boost
        limit.threshold = min(max(limit.threshold, options.lowest), options.highest)
