"""From a draft model's own probabilities to the acceptance of its guesses: what a node's gain is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pronk.speculation.proposer import Outcome
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.tree import Origin

__all__ = ["Calibration"]

# How far one guess moves the bias, in nats of odds, and how far it goes at most: a draft that is always right in what
# it finds unlikely, as in a text that repeats itself, is believed after ten guesses or so.
_STEP, _MOST = 0.25, 4.0

# Confidences that are alike for what all requests know, in thousandths.
_TENTH = 100


@dataclass
class Calibration:
    """How far one request's acceptance lies above or below the confidence of the guesses.

    With the confidence ``p``, the probability that the draft gives its guess, or what such guesses of other requests
    have come to, a guess whose parent was accepted is accepted with the probability
    ``1 / (1 + exp(-(log(p / (1 - p)) + bias)))``, and the bias follows what was accepted by gradient descent on the
    log-loss: one number, so that it learns of every guess about all others.

    Attributes:
        source: the drafter's name, as its nodes' origins have it.
        bias: 0 believes the draft.
        known: what other requests have shown.
    """

    source: str
    bias: float = 0.0
    known: SharedAcceptance = field(default_factory=SharedAcceptance, compare=False)

    def origin(self, confidence: float) -> Origin:
        """Of a guess with this confidence, 0..1, which it keeps in thousandths."""
        return self.source, min(max(round(1000 * confidence), 1), 999)

    def rate(self, origin: Origin, depth: int = 0) -> float:
        """Estimated acceptance, above 0 and below 1; ``depth`` in the tree is from 1, 0 is any."""
        p = origin[1] / 1000
        if self.known.acceptance_stats is not None:
            p = min(max(self._shift(origin[1], depth) + p, 0.001), 0.999)
        return 1.0 / (1.0 + (1.0 - p) / p * math.exp(-self.bias))

    def learn(self, outcome: Outcome[Any]) -> None:
        """Hear what became of a tree. Other drafters' nodes in it do not matter."""
        tree, path = outcome.evaluated
        if tree.origin is None:
            return
        visited, accepted = {0, *path}, {*path}
        for node in range(1, len(tree)):
            origin = tree.origin[node]
            if origin[0] == self.source and tree.parents[node] in visited and tree.acceptable[node]:
                right, depth = node in accepted, tree.depths[node]
                self.bias += _STEP * (right - self.rate(origin, depth))
                self.known.learn(self.source, origin[1] // _TENTH, depth, outcome.params, right=right)
        self.bias = min(max(self.bias, -_MOST), _MOST)

    def _shift(self, thousandths: int, depth: int) -> float:
        """How much more often than the draft says guesses of about this confidence have been right."""
        tenth = thousandths // _TENTH
        middle = (tenth + 0.5) * _TENTH / 1000
        return self.known.rate(self.source, tenth, depth, middle) - middle
