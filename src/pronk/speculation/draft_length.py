"""Whether it pays to draft one more token: contract 10 for drafters that pay per token.

With gains ``g``, the probabilities that the target accepts the tokens drafted so far, ``t(n)`` the time of the target's
pass over ``n`` rows, ``d`` that of a draft's pass, and ``a`` the acceptance of this request's recent guesses, a chain
of ``k`` tokens is worth ::

    1 + g_1 + … + g_k                                1 + g_1 + … + g_k + g_k (a + a² + … + a^m)
    ─────────────────    and with ``m`` more      ────────────────────────────────────────────
      t(1 + k) + k d                                       t(1 + k + m) + (k + m) d

tokens per second. It goes on if that is more for any ``m``; passes over 5 to 8 rows cost the same, so one more token
alone may not pay where three do. A request for which not even the first token pays decodes plainly, and tries again
after a while: after 4 steps, and after twice as many each time that it was in vain, up to 64.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pronk.speculation.cost_model import CostCurve
from pronk.speculation.tree import TokenTree

__all__ = ["Backoff", "DraftLengthTracker", "StepCost"]

# Recent guesses count most: half the weight is gone after 7 steps.
_FADE = 0.9
_PRIOR, _WEIGHT = 0.7, 2.0
_SOONEST, _LATEST = 4, 64
_BRIEFEST, _LONGEST = 2, 32

# Tokens by which it looks ahead: beyond two units of rows little is left of a chain.
_AHEAD = 8


@dataclass(frozen=True)
class StepCost:
    """What a request's share of the passes costs, where ``requests`` do alike.

    Attributes:
        target: of the target's passes.
        draft: of the draft's.
        requests: that share them.
    """

    target: CostCurve
    draft: CostCurve
    requests: int

    def seconds(self, drafted: int, passes: int | None = None) -> float:
        """Seconds of a step with ``drafted`` drafted tokens, in ``passes`` passes of the draft (by default as many)."""
        passes = drafted if passes is None else passes
        return (self.target.at(self.requests * (1 + drafted)) + passes * self.draft.at(self.requests)) / self.requests


@dataclass
class DraftLengthTracker:
    """How one request's drafts have fared of late.

    Attributes:
        offered: (faded) number of guesses whose parent was accepted.
        taken: of those that were accepted.
        idle: steps without a guess since the last one with some.
        patience: steps without a guess after which it is tried again.
    """

    offered: float = 0.0
    taken: float = 0.0
    idle: int = 0
    patience: int = _SOONEST

    @property
    def rate(self) -> float:
        """Probability that a guess is accepted if its parent was."""
        return (self.taken + _PRIOR * _WEIGHT) / (self.offered + _WEIGHT)

    def goes_on(self, gains: Sequence[float], most: int, step_cost: StepCost) -> bool:
        """Whether a chain whose tokens have ``gains`` is worth going on with, up to ``most`` tokens in all."""
        drafted = len(gains)
        expected, gain = 1.0 + sum(gains), gains[-1] if gains else 1.0
        now = expected / step_cost.seconds(drafted)
        for number in range(drafted + 1, min(most, drafted + _AHEAD) + 1):
            gain *= self.rate
            expected += gain
            if expected / step_cost.seconds(number) > now:
                return True
        return False

    @property
    def tries(self) -> bool:
        """Whether it is time to guess although it does not seem to pay."""
        return self.idle >= self.patience

    def learn(self, draft_tokens: int, accepted: int) -> None:
        """Hear of a step: a chain of ``draft_tokens``, the first ``accepted`` of which the target confirmed."""
        if not draft_tokens:
            self.idle += 1
            return
        if self.idle:
            self.patience = _SOONEST if accepted else min(_LATEST, 2 * self.patience)
        self.idle = 0
        self.offered = _FADE * self.offered + min(draft_tokens, accepted + 1)
        self.taken = _FADE * self.taken + accepted


@dataclass
class Backoff:
    """For drafters whose guesses all cost one pass together: steps without it, after the engine has kept nothing.

    Attributes:
        steps: for which it does not seem to pay to guess.
        patience: the next time that nothing is kept it is that many: 2 at first, and twice as many each time, up to 32.
    """

    steps: int = 0
    patience: int = _BRIEFEST

    def learn(self, tree: TokenTree, sources: Collection[str], *, guessed: bool) -> None:
        """Hear of the tree of a step.

        Args:
            tree: as it was verified.
            sources: what the origins of the drafter's guesses say.
            guessed: whether it could have guessed, had it not rested.
        """
        if any(source in sources for source, _ in tree.origin or ()):
            self.steps, self.patience = 0, _BRIEFEST
        elif self.steps:
            self.steps -= 1
        elif guessed and not tree.num_draft_tokens:  # or else another drafter went first
            self.steps, self.patience = self.patience, min(_LONGEST, 2 * self.patience)
