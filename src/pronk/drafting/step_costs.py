"""Expected seconds and tokens of a step with draft tokens, by which the planner compares steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import truediv
from typing import NamedTuple

from pronk.models.cost_model import CostCurve

# Number of further draft tokens for which the seconds of a pass are computed at once.
_MORE_TOKENS = 8


class ExpectedStep(NamedTuple):
    """Expected tokens and seconds of one request in a step, for one choice of its draft tokens.

    Attributes:
        tokens: expected tokens that the step adds to the text, at least 1.
        seconds: the request's part of the step's duration.
    """

    tokens: float
    seconds: float

    @property
    def token_seconds(self) -> float:
        """Seconds per token of this step, the smaller the better."""
        return self.seconds / self.tokens

    def is_faster(self, other: ExpectedStep) -> bool:
        """Return whether this step has more expected tokens per second than another one."""
        return self.tokens * other.seconds > other.tokens * self.seconds


@dataclass(slots=True)
class StepCosts:
    """Costs of a step, from which the part of one request is computed; read-only.

    Attributes:
        curve: seconds of the target's forward pass by its number of rows.
        num_requests: number of requests that decode in the step; all are assumed to verify equally
            many draft tokens.
    """

    curve: CostCurve
    num_requests: int = 1
    # results of ``pass_seconds`` for 0, 1, 2, … draft tokens, as far as they were needed
    _by_count: list[float] = field(default_factory=list, init=False, repr=False, compare=False)

    def by_count(self, most: int) -> Sequence[float]:
        """Return :meth:`pass_seconds` of 0, 1, 2, … draft tokens, up to ``most`` at least."""
        known = self._by_count
        if len(known) <= most:
            requests = self.num_requests
            first = requests * (1 + len(known))
            stop = requests * (1 + most + _MORE_TOKENS)
            seconds = self.curve.table(range(first, stop, requests))
            known.extend(map(truediv, seconds, repeat(requests)))
        return known

    def pass_seconds(self, num_draft_tokens: int) -> float:
        """Return one request's part, in seconds, of a forward pass that verifies its draft tokens.

        The other requests are assumed to have ``num_draft_tokens`` draft tokens as well.
        """
        return self.by_count(num_draft_tokens)[num_draft_tokens]

    def plain(self) -> ExpectedStep:
        """Return the expected step without draft tokens: one token."""
        return ExpectedStep(1.0, self.pass_seconds(0))

    def best(self, gains: Iterable[float]) -> ExpectedStep:
        """Return the fastest step (most tokens per second) that verifies some of the draft tokens.

        ``gains`` are the draft tokens' probabilities of acceptance. The result may have no draft
        token.
        """
        ranked = sorted(gains, reverse=True)
        by_count = self.by_count(len(ranked))
        tokens = 1.0
        best_tokens = tokens
        best_seconds = by_count[0]
        for count, gain in enumerate(ranked, 1):
            tokens += gain
            seconds = by_count[count]
            if tokens * best_seconds > best_tokens * seconds:  # more tokens per second
                best_tokens = tokens
                best_seconds = seconds
        return ExpectedStep(best_tokens, best_seconds)


class ChainCosts(NamedTuple):
    """Costs of a drafter that drafts token by token, in seconds of one request.

    Attributes:
        token: seconds per draft token.
        prefill: seconds to read the text that is new since the last proposal.
        start: seconds of a proposal in addition to ``prefill`` and to those per token.
        max_tokens: largest number of draft tokens of a proposal; a request may have a lower limit.
    """

    token: float
    prefill: float = 0.0
    start: float = 0.0
    max_tokens: int = 128
