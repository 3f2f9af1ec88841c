"""From a draft model's own probabilities to the acceptance of its guesses: what a node's gain is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pronk.tree import Origin, TokenTree

__all__ = ["Calibration"]

# How far one guess moves the bias, in nats of odds, and how far it goes at most: a draft that is always right in what
# it finds unlikely, as in a text that repeats itself, is believed after ten guesses or so.
_STEP, _MOST = 0.25, 4.0


@dataclass
class Calibration:
    """How far one request's acceptance lies above or below the confidence of the guesses.

    With the confidence ``p``, the probability that the draft gives its guess, a guess whose parent was accepted is
    accepted with the probability ``1 / (1 + exp(-(log(p / (1 - p)) + bias)))``, and the bias follows what was accepted
    by gradient descent on the log-loss: one number, so that it learns of every guess about all others.

    Attributes:
        source: the drafter's name, as its nodes' origins have it.
        bias: 0 believes the draft.
    """

    source: str
    bias: float = 0.0

    def origin(self, confidence: float) -> Origin:
        """Of a guess with this confidence, 0..1, which it keeps in thousandths."""
        return self.source, min(max(round(1000 * confidence), 1), 999)

    def rate(self, origin: Origin) -> float:
        """Estimated acceptance, above 0 and below 1."""
        p = origin[1] / 1000
        return 1.0 / (1.0 + (1.0 - p) / p * math.exp(-self.bias))

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Hear of a verified tree; ``path`` are its accepted nodes. Other drafters' nodes in it do not matter."""
        if tree.origin is None:
            return
        visited, accepted = {0, *path}, {*path}
        for node in range(1, len(tree)):
            origin = tree.origin[node]
            if origin[0] == self.source and tree.parents[node] in visited and tree.acceptable[node]:
                self.bias += _STEP * ((node in accepted) - self.rate(origin))
        self.bias = min(max(self.bias, -_MOST), _MOST)
