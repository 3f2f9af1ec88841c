"""Regret of the planner's choices: seconds that other choices would have saved, in hindsight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Regret:
    """Seconds that other choices of drafters and draft tokens would have saved, in hindsight.

    A step of one request that verifies ``k`` draft tokens and accepts ``a`` of them saves, compared
    with plain decoding ::

        a · t(1)  -  (t(1 + k) - t(1))  -  seconds of the proposals

    ``t(n)`` is the estimated time of a forward pass over ``n`` rows
    (:mod:`pronk.models.cost_model`). The *best choice of a step* verifies exactly the proposed
    tokens that turned out right, and asks only the drafter that proposed them. A *drafter alone*
    verifies all tokens that it proposed. Both figures use only the proposals that were made: a
    drafter counts in the steps in which it was asked.

    Attributes:
        seconds: duration of the steps whose costs are known, one request's part.
        saved: seconds that the choices made have saved, compared with plain decoding; may be
            negative.
        best_steps: seconds that the best choice in every step would have saved, at least 0.
        drafters: seconds that each drafter would have saved alone, by its name; may be negative.
    """

    seconds: float = 0.0
    saved: float = 0.0
    best_steps: float = 0.0
    drafters: dict[str, float] = field(default_factory=dict)

    def add_step(self, saved: float, alone: Mapping[str, float], best: float) -> None:
        """Add the savings of one step, each compared with a step without draft tokens.

        Args:
            saved: seconds that the choices made have saved.
            alone: seconds that each drafter alone would have saved, by its name.
            best: seconds that the best choice would have saved.
        """
        self.saved += saved
        self.best_steps += max(0.0, best)
        for drafter, seconds in alone.items():
            self.drafters[drafter] = self.drafters.get(drafter, 0.0) + seconds

    def add(self, other: Regret) -> None:
        """Add the seconds of ``other``, which was measured in other steps."""
        self.seconds += other.seconds
        self.add_step(other.saved, other.drafters, other.best_steps)

    @property
    def best_drafter(self) -> str | None:
        """Name of the drafter that would have saved most.

        ``None`` if plain decoding would have been faster.
        """
        best = max(self.drafters, key=self.drafters.__getitem__, default=None)
        return best if best is not None and self.drafters[best] > 0.0 else None

    @property
    def against_drafter(self) -> float | None:
        """Speed reached, divided by the speed of the best drafter alone; may be above 1."""
        return self._against(max([0.0, *self.drafters.values()]))

    @property
    def against_steps(self) -> float | None:
        """Speed reached, divided by the speed of the best choice in every step; usually below 1."""
        return self._against(self.best_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the best drafter and both ratios as JSON values.

        They are ``None`` if no step with known costs was recorded.
        """
        return {
            name: getattr(self, name)
            for name in ("best_drafter", "against_drafter", "against_steps")
        }

    def _against(self, saved: float) -> float | None:
        # Plain decoding would have taken ``seconds + self.saved``; the other choice would have
        # taken ``saved`` seconds less. The ratio of the speeds is the inverse ratio of the times.
        ratio = (self.seconds + self.saved - saved) / self.seconds if self.seconds > 0.0 else 0.0
        return ratio if ratio > 0.0 else None
