"""Record of the speculation decisions of a request, step by step; see :mod:`pronk.explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pronk.speculation.cost_model import CostCurve
from pronk.speculation.proposer import Outcome, SourceReport
from pronk.speculation.request_budget import RequestBudget
from pronk.speculation.tree import TokenTree

__all__ = ["Decision", "DecisionTrace"]


@dataclass(frozen=True)
class Decision:
    """Speculation decisions and results of one decoding step."""

    source_reports: tuple[SourceReport, ...]  # reports of the drafters that proposed, in order
    offered: TokenTree  # proposed tree
    kept: TokenTree  # verified tree: ``offered`` without the dropped draft tokens
    path: tuple[int, ...]  # accepted nodes of ``kept``
    tokens: tuple[int, ...]  # committed token ids
    plain: float | None  # estimated seconds of a step without draft tokens, per request; ``None``: not yet measured
    expected: float | None  # estimated seconds of the step with ``kept``, per request and without drafting
    asking: float  # measured seconds of drafting
    seconds: float  # measured seconds of the step without drafting, for all requests together
    credit: float | None  # ``RequestBudget.credit``: time saved by speculation and not yet lost again, in plain steps
    shared_budget: float | None  # ``SharedBudget.left``: time that all requests may still lose, in plain steps

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of draft tokens proposed, verified and accepted."""
        offered, kept = (sum(tree.acceptable) - 1 for tree in (self.offered, self.kept))
        return offered, kept, len(self.path)

    @property
    def gain(self) -> float:
        """Expected number of committed tokens, the bonus token included."""
        gain = self.kept.gain
        return 1.0 + (0.0 if gain is None else sum(gain[1:]))

    @property
    def value(self) -> float | None:
        """Expected number of committed tokens in the time of a step without draft tokens; above 1 is faster."""
        return None if self.plain is None or not self.expected else self.gain * self.plain / self.expected


@dataclass
class DecisionTrace:
    """Recorded decisions of one request, one per decoding step."""

    steps: list[Decision] = field(default_factory=list)
    _source_reports: tuple[SourceReport, ...] = ()
    _offered: TokenTree | None = None
    _draft_seconds: float = 0.0

    def record_proposal(self, source_reports: Sequence[SourceReport], tree: TokenTree) -> None:
        """Record a proposed tree and the reports of the drafters."""
        self._source_reports, self._offered = tuple(source_reports), tree

    def add_draft_seconds(self, seconds: float) -> None:
        """Add drafting time."""
        self._draft_seconds += seconds

    def record_step(
        self,
        outcome: Outcome[Any],
        costs: CostCurve | None,
        requests: int,
        seconds: float,
        request_budget: RequestBudget | None,
    ) -> None:
        """Record a step of ``requests`` requests that took ``seconds`` without drafting."""
        kept = outcome.tree
        self.steps.append(
            Decision(
                self._source_reports,
                self._offered or kept,
                kept,
                outcome.path,
                outcome.committed,
                None if costs is None else costs.at(requests) / requests,
                None if costs is None else costs.at(requests * len(kept)) / requests,
                self._draft_seconds,
                seconds,
                None if request_budget is None else request_budget.credit,
                None if request_budget is None else request_budget.shared_budget.left,
            )
        )
        self._source_reports, self._offered, self._draft_seconds = (), None, 0.0
