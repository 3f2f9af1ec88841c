"""Speculation decisions of a request, one record per decoding step; used by :mod:`pronk.explain`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pronk.speculation.cost_model import CostCurve
from pronk.speculation.policy import SourceReport
from pronk.speculation.proposer import Outcome
from pronk.speculation.tree import TokenTree


@dataclass(frozen=True)
class Decision:
    """Speculation decisions and results of one decoding step."""

    source_reports: tuple[SourceReport, ...]  # one per drafter that was asked; ``auto`` asks several
    offered: TokenTree  # proposed tree
    kept: TokenTree  # verified tree: ``offered`` without the draft tokens that were dropped before verification
    path: tuple[int, ...]  # accepted nodes of ``kept``, without the root
    tokens: tuple[int, ...]  # committed token ids
    # Estimates in seconds for ``n`` decoding requests, where a step of ``rows`` rows takes ``costs.at(rows)`` seconds.
    # ``None`` if the costs are unknown.
    plain: float | None  # step without draft tokens, one request's part: ``costs.at(n) / n``
    expected: float | None  # step with ``len(kept)`` rows per request, one request's part: ``costs.at(n * rows) / n``
    asking: float  # measured seconds in the drafter, this request's part
    seconds: float  # measured seconds of the whole step without the time in drafters, for all requests
    allowance: float  # ``Policy.allowance``: seconds that drafting may still cost the engine

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of proposed, verified and accepted draft tokens, in this order."""
        offered, kept = (sum(tree.acceptable) - 1 for tree in (self.offered, self.kept))
        return offered, kept, len(self.path)

    @property
    def gain(self) -> float:
        """Expected number of committed tokens: 1 (the bonus token) plus the gains of the verified tree."""
        gain = self.kept.gain
        return 1.0 + (0.0 if gain is None else sum(gain[1:]))

    @property
    def value(self) -> float | None:
        """``gain * plain / expected``: estimated speed-up over a step without draft tokens."""
        return None if self.plain is None or not self.expected else self.gain * self.plain / self.expected


@dataclass
class DecisionTrace:
    """Recorded decisions of one request, one per decoding step."""

    steps: list[Decision] = field(default_factory=list)
    offered: TokenTree | None = None  # tree that was proposed in the current step
    draft_seconds: float = 0.0  # seconds that the drafter has taken in the current step

    def record_step(
        self, outcome: Outcome[Any], costs: CostCurve | None, num_requests: int, seconds: float, allowance: float
    ) -> None:
        """Record the current step, in which ``num_requests`` requests decoded."""
        kept = outcome.tree
        self.steps.append(
            Decision(
                tuple(outcome.policy.reports),
                self.offered or kept,
                kept,
                outcome.path,
                outcome.committed,
                None if costs is None else costs.at(num_requests) / num_requests,
                None if costs is None else costs.at(num_requests * len(kept)) / num_requests,
                self.draft_seconds,
                seconds,
                allowance,
            )
        )
        self.offered, self.draft_seconds = None, 0.0
