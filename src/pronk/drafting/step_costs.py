"""Seconds of a step, and its expected tokens per second: what the planner compares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pronk.models.cost_model import CostCurve


class ExpectedStep(NamedTuple):
    """One request's part of a step, with some draft tokens or none."""

    tokens: float  # expected tokens, at least 1
    seconds: float

    @property
    def token_seconds(self) -> float:
        """Seconds per token: what a token is worth."""
        return self.seconds / self.tokens

    def is_faster(self, other: ExpectedStep) -> bool:
        """Return whether this step has more expected tokens per second than another one."""
        return self.tokens * other.seconds > other.tokens * self.seconds


class StepCosts(NamedTuple):
    """Costs of one request's part of a step."""

    curve: CostCurve  # seconds of the target's forward pass by its number of rows
    num_requests: int = 1  # requests that decode in the step; all are assumed to choose alike

    def pass_seconds(self, num_draft_tokens: int) -> float:
        """Return the request's part of a forward pass with this number of draft tokens."""
        return self.curve.at(self.num_requests * (1 + num_draft_tokens)) / self.num_requests

    def row_seconds(self, num_draft_tokens: int) -> float:
        """Return by how many seconds draft tokens lengthen the request's part."""
        return self.pass_seconds(num_draft_tokens) - self.pass_seconds(0)

    def plain(self) -> ExpectedStep:
        """Return the step without draft tokens."""
        return ExpectedStep(1.0, self.pass_seconds(0))

    def best(self, gains: Iterable[float]) -> ExpectedStep:
        """Return the fastest step with draft tokens of these gains, or with some of them."""
        best = self.plain()
        tokens = 1.0
        for count, gain in enumerate(sorted(gains, reverse=True), 1):
            tokens += gain
            step = ExpectedStep(tokens, self.pass_seconds(count))
            if step.is_faster(best):
                best = step
        return best


class ChainCosts(NamedTuple):
    """Seconds of a drafter that drafts token by token, one request's part."""

    token: float  # a draft token
    prefill: float = 0.0  # reading the text since the last proposal
    start: float = 0.0  # a proposal, besides reading and draft tokens
    max_tokens: int = 128  # largest number of draft tokens; the request may have a lower limit
