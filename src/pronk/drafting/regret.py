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
    """

    seconds: float = 0.0  # duration of the steps whose costs are known, one request's part
    # saved by the choices that were made, compared with plain decoding; may be negative
    saved: float = 0.0
    best_steps: float = 0.0  # what the best choice of every step would have saved, at least 0
    # what each drafter would have saved alone; may be negative
    drafters: dict[str, float] = field(default_factory=dict)

    def add_step(self, saved: float, alone: Mapping[str, float], best: float) -> None:
        """Add the seconds that one step's choices saved, compared with a plain step.

        Args:
            saved: by the choices that were made.
            alone: by each drafter alone.
            best: by the best choice.
        """
        self.saved += saved
        self.best_steps += max(0.0, best)
        for drafter, seconds in alone.items():
            self.drafters[drafter] = self.drafters.get(drafter, 0.0) + seconds

    def add(self, other: Regret) -> None:
        """Add the seconds of other steps."""
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
        """Speed that was reached over that of the best drafter alone; may be above 1."""
        return self._against(max([0.0, *self.drafters.values()]))

    @property
    def against_steps(self) -> float | None:
        """Speed that was reached over that of the best choice of every step, usually below 1."""
        return self._against(self.best_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the ratios as JSON values, ``None`` without any step of known costs."""
        return {
            name: getattr(self, name)
            for name in ("best_drafter", "against_drafter", "against_steps")
        }

    def _against(self, saved: float) -> float | None:
        # Plain decoding takes seconds + self.saved; the other choice takes ``saved`` less than
        # that.
        ratio = (self.seconds + self.saved - saved) / self.seconds if self.seconds > 0.0 else 0.0
        return ratio if ratio > 0.0 else None
