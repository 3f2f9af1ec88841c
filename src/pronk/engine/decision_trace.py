"""What was decided for a request, step by step, for whoever asks why; kept of requests that have a journal."""

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
    """One step that chose tokens.

    Attributes:
        source_reports: who was asked for guesses, in turn.
        offered: what they offered, as one tree.
        kept: what of it was computed.
        path: nodes of that which were accepted.
        tokens: that became certain.
        plain: seconds that a step without guesses is believed to take, a request's share; ``None`` while nobody knows.
        expected: seconds that a step with what was kept is believed to take, but for asking; the same.
        asking: seconds that guessers took.
        seconds: that the pass took, and what is done with it, for all its requests.
        credit: plain steps that guessing has gained the request, and may be lost again.
        shared_budget: plain steps that all requests of the guesser may lose together.
    """

    source_reports: tuple[SourceReport, ...]
    offered: TokenTree
    kept: TokenTree
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    plain: float | None
    expected: float | None
    asking: float
    seconds: float
    credit: float | None
    shared_budget: float | None

    @property
    def counts(self) -> tuple[int, int, int]:
        """Guesses offered, kept, and right."""
        offered, kept = (sum(tree.acceptable) - 1 for tree in (self.offered, self.kept))
        return offered, kept, len(self.path)

    @property
    def gain(self) -> float:
        """Tokens that were to be expected of what was kept, the bonus token included."""
        gain = self.kept.gain
        return 1.0 + (0.0 if gain is None else sum(gain[1:]))

    @property
    def value(self) -> float | None:
        """Tokens to be expected in the time of a plain step; 1 is plain decoding."""
        return None if self.plain is None or not self.expected else self.gain * self.plain / self.expected


@dataclass
class DecisionTrace:
    """The steps of one request.

    Attributes:
        steps: so far.
    """

    steps: list[Decision] = field(default_factory=list)
    _consulted: tuple[SourceReport, ...] = ()
    _offered: TokenTree | None = None
    _asking: float = 0.0

    def offer(self, source_reports: Sequence[SourceReport], tree: TokenTree) -> None:
        """Guessers have been asked, and have offered a tree."""
        self._consulted, self._offered = tuple(source_reports), tree

    def took(self, seconds: float) -> None:
        """Guessers have been at work."""
        self._asking += seconds

    def settle(
        self,
        outcome: Outcome[Any],
        costs: CostCurve | None,
        requests: int,
        seconds: float,
        request_budget: RequestBudget | None,
    ) -> None:
        """The step is through.

        Args:
            outcome: what the target said.
            costs: that were believed in, where they matter.
            requests: that shared the pass.
            seconds: that it took.
            request_budget: of the request.
        """
        kept = outcome.tree
        self.steps.append(
            Decision(
                self._consulted,
                self._offered or kept,
                kept,
                outcome.path,
                outcome.committed,
                None if costs is None else costs.at(requests) / requests,
                None if costs is None else costs.at(requests * len(kept)) / requests,
                self._asking,
                seconds,
                None if request_budget is None else request_budget.credit,
                None if request_budget is None else request_budget.shared_budget.left,
            )
        )
        self._consulted, self._offered, self._asking = (), None, 0.0
