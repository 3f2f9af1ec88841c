"""What was decided for a request, step by step, for whoever asks why; kept of requests that have a journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pronk.drafters.base import Consulted, Outcome
from pronk.engine.ledger import Ledger
from pronk.passes.costs import PassCosts
from pronk.tree import TokenTree

__all__ = ["Entry", "Journal"]


@dataclass(frozen=True)
class Entry:
    """One step that chose tokens.

    Attributes:
        consulted: who was asked for guesses, in turn.
        offered: what they offered, as one tree.
        kept: what of it was computed.
        path: nodes of that which were accepted.
        tokens: that became certain.
        plain: seconds that a step without guesses is believed to take, a request's share; ``None`` while nobody knows.
        expected: seconds that a step with what was kept is believed to take, but for asking; the same.
        asking: seconds that guessers took.
        seconds: that the pass took, and what is done with it, for all its requests.
        credit: plain steps that guessing has gained the request, and may be lost again.
        fund: plain steps that all requests of the guesser may lose together.
    """

    consulted: tuple[Consulted, ...]
    offered: TokenTree
    kept: TokenTree
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    plain: float | None
    expected: float | None
    asking: float
    seconds: float
    credit: float | None
    fund: float | None

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
class Journal:
    """The steps of one request.

    Attributes:
        steps: so far.
    """

    steps: list[Entry] = field(default_factory=list)
    _consulted: tuple[Consulted, ...] = ()
    _offered: TokenTree | None = None
    _asking: float = 0.0

    def offer(self, consulted: Sequence[Consulted], tree: TokenTree) -> None:
        """Guessers have been asked, and have offered a tree."""
        self._consulted, self._offered = tuple(consulted), tree

    def took(self, seconds: float) -> None:
        """Guessers have been at work."""
        self._asking += seconds

    def settle(
        self, outcome: Outcome[Any], costs: PassCosts | None, requests: int, seconds: float, ledger: Ledger | None
    ) -> None:
        """The step is through.

        Args:
            outcome: what the target said.
            costs: that were believed in, where they matter.
            requests: that shared the pass.
            seconds: that it took.
            ledger: of the request.
        """
        kept = outcome.tree
        self.steps.append(
            Entry(
                self._consulted,
                self._offered or kept,
                kept,
                outcome.path,
                outcome.committed,
                None if costs is None else costs.at(requests) / requests,
                None if costs is None else costs.at(requests * len(kept)) / requests,
                self._asking,
                seconds,
                None if ledger is None else ledger.credit,
                None if ledger is None else ledger.fund.left,
            )
        )
        self._consulted, self._offered, self._asking = (), None, 0.0
