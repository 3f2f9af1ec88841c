"""How often guesses turn out right, by the way they were found: what a node's gain is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pronk.speculation.proposer import Outcome
from pronk.speculation.shared_acceptance import SharedAcceptance

__all__ = ["AcceptanceRates"]

# What was seen loses this share of its weight with every step, so that a way of guessing that fell out of use is tried
# again when the text may have changed: half is gone after 34 steps.
_FADE = 0.98


@dataclass
class AcceptanceRates:
    """Acceptance of one drafter's guesses for one request, calibrated as it decodes.

    A rate belongs to an edge of the tree: the probability that a guess is the target's choice, given that its parent
    was. The gain of a node is the product along its path.

    Attributes:
        source: the drafter's name, as its nodes' origins have it.
        priors: way of guessing to the rate that is believed before anything was seen.
        known: what other requests have shown.
        weight: how many observations that belief is worth.
        offered: way to (faded) number of guesses whose parent was accepted.
        taken: way to number of those that were accepted.
    """

    source: str
    priors: Mapping[int, float]
    known: SharedAcceptance = field(default_factory=SharedAcceptance, compare=False)
    weight: float = 4.0
    offered: dict[int, float] = field(default_factory=dict)
    taken: dict[int, float] = field(default_factory=dict)

    def rate(self, way: int, depth: int = 0) -> float:
        """Estimated acceptance of a guess found this way, above 0 and below 1; ``depth`` 0 is any."""
        prior = self.prior(way, depth)
        return (self.taken.get(way, 0.0) + prior * self.weight) / (self.offered.get(way, 0.0) + self.weight)

    def prior(self, way: int, depth: int) -> float:
        """What this request did not learn itself."""
        return self.known.rate(self.source, way, depth, self.priors[way])

    def learn(self, outcome: Outcome[Any]) -> None:
        """Count what became of a tree. Other drafters' nodes in it do not matter."""
        tree, path = outcome.evaluated
        if tree.origin is None:
            return
        for seen in (self.offered, self.taken):
            for way in seen:
                seen[way] *= _FADE
        visited, accepted = {0, *path}, set(path)
        for node in range(1, len(tree)):
            source, way = tree.origin[node]
            if source == self.source and tree.parents[node] in visited and tree.acceptable[node]:
                self.offered[way] = self.offered.get(way, 0.0) + 1.0
                if node in accepted:
                    self.taken[way] = self.taken.get(way, 0.0) + 1.0
                self.known.learn(source, way, tree.depths[node], outcome.params, right=node in accepted)
