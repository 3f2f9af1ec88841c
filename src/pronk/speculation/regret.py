"""Regret: seconds that other choices of drafters and draft tokens would have saved, in hindsight.

A step of one request that verifies ``k`` draft tokens and accepts ``a`` of them saves, compared with plain decoding ::

    a · t(1)  -  (t(1 + k) - t(1))  -  seconds of the proposals

``t(n)`` is the estimated time of a forward pass over ``n`` rows (:mod:`pronk.speculation.cost_model`). The *best choice
of a step* verifies exactly the proposed tokens that turned out right, and asks only the drafter that proposed them. A
*drafter alone* verifies all tokens that it proposed. Both figures use only the proposals that were made: a drafter
counts in the steps in which it was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Regret:
    """Seconds that decoding steps took, and that choices saved in them."""

    seconds: float = 0.0  # duration of the steps whose costs are known, one request's part
    saved: float = 0.0  # saved by the choices that were made, compared with plain decoding; may be negative
    best_steps: float = 0.0  # what the best choice of every step would have saved, at least 0
    sources: dict[str, float] = field(default_factory=dict)  # what each drafter would have saved alone; may be negative

    def add_step(self, saved: float, alone: Mapping[str, float], best: float) -> None:
        """Add the seconds that one step's choices saved: those made, each drafter alone, and the best choice."""
        self.saved += saved
        self.best_steps += max(0.0, best)
        for source, seconds in alone.items():
            self.sources[source] = self.sources.get(source, 0.0) + seconds

    def add(self, other: Regret) -> None:
        """Add the seconds of other steps."""
        self.seconds += other.seconds
        self.add_step(other.saved, other.sources, other.best_steps)

    @property
    def best_source(self) -> str | None:
        """Name of the drafter that would have saved most; ``None`` if plain decoding would have been faster."""
        best = max(self.sources, key=self.sources.__getitem__, default=None)
        return best if best is not None and self.sources[best] > 0.0 else None

    @property
    def against_source(self) -> float | None:
        """Speed that was reached over that of the best drafter alone; may be above 1."""
        best = self.best_source
        return self._against(0.0 if best is None else self.sources[best])

    @property
    def against_steps(self) -> float | None:
        """Speed that was reached over that of the best choice of every step, usually below 1."""
        return self._against(self.best_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the ratios as JSON values, ``None`` without any step of known costs."""
        return {name: getattr(self, name) for name in ("best_source", "against_source", "against_steps")}

    def _against(self, saved: float) -> float | None:
        # Plain decoding takes seconds + self.saved; the other choice takes ``saved`` less than that.
        ratio = (self.seconds + self.saved - saved) / self.seconds if self.seconds > 0.0 else 0.0
        return ratio if ratio > 0.0 else None
