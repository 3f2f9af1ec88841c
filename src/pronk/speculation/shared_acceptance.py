"""What a request knows of guesses from the requests before it, and what it tells those after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pronk.sampling.params import SamplingParams
from pronk.speculation.acceptance_stats import DEEP, SHARE, AcceptanceStats
from pronk.speculation.target import Target

__all__ = ["SharedAcceptance"]


@dataclass
class SharedAcceptance:
    """One request's view of :class:`~pronk.speculation.acceptance_stats.AcceptanceStats`.

    Attributes:
        acceptance_stats: of all requests; ``None`` where requests do not learn from each other.
        temperature: of the request, as soon as it is known.
        left: guesses that it may still tell of.
    """

    acceptance_stats: AcceptanceStats | None = None
    temperature: float | None = None
    left: int = SHARE
    _rates: dict[tuple[str, int, int], float] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, target: Target | None) -> SharedAcceptance:
        """What a new request knows."""
        return cls(None if target is None else target.acceptance_stats)

    def rate(self, source: str, kind: int, depth: int, prior: float) -> float:
        """How often such guesses were right when the request began to ask; ``prior`` where nobody knows."""
        if self.acceptance_stats is None:
            return prior
        key = source, kind, min(depth, DEEP)
        found = self._rates.get(key)
        if found is None:
            found = self._rates[key] = self.acceptance_stats.rate(source, kind, depth, self.temperature, prior)
        return found

    def learn(self, source: str, kind: int, depth: int, params: SamplingParams, *, right: bool) -> None:
        """Tell of a guess, but for requests whose guesses say something of their random numbers."""
        if self.acceptance_stats is None or params.rejects:
            return
        if self.temperature is None:
            self.temperature = params.temperature
            self._rates.clear()
        if self.left > 0:
            self.left -= 1
            self.acceptance_stats.learn(source, kind, depth, params.temperature, right=right)
