"""Draft tokens chosen from a draft model's logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["DraftToken", "argmax_token"]


@dataclass(frozen=True)
class DraftToken:
    """A token that a draft model proposes.

    Attributes:
        token: proposed token id.
        confidence: largest softmax probability of ``scores``, in (0, 1]. Under the coupled rule this is the maximum of
            softmax(logits / T + Gumbel noise). It is noisy and is NOT the draft model's own probability max p: for a
            distribution with max p = 0.59 at T = 0.8 the confidence has mean 0.634 and standard deviation 0.186. Greedy
            and under the other two rules ``scores`` have no noise, and the confidence is max p.
        scores: ``[vocab]``: log-probabilities up to a constant, plus the target's Gumbel noise under the coupled rule.
            Higher is likelier to be the target's token. ``-inf`` excludes a token.
        q: ``[vocab]`` float64 distribution that ``token`` was drawn from; ``None`` if ``token`` is the argmax of
            ``scores``.
    """

    token: int
    confidence: float
    scores: NDArray[np.floating[Any]]
    q: Tensor | None = None

    def ranked(self, count: int) -> list[tuple[int, float]]:
        """Return the ``count`` tokens of highest score, best first, each with its softmax probability."""
        remaining, best = self.scores.copy(), list[tuple[int, float]]()
        # Repeated argmax is faster than a partition for up to about a dozen tokens.
        for _ in range(min(count, len(remaining))):
            token = int(remaining.argmax())
            if remaining[token] == -math.inf:
                break
            best.append((token, float(remaining[token])))
            remaining[token] = -math.inf
        probs = [self.confidence * math.exp(score - best[0][1]) for _, score in best]
        return [(token, prob) for (token, _), prob in zip(best, probs, strict=True) if prob > 0.0]


def argmax_token(scores: NDArray[np.floating[Any]]) -> DraftToken:
    """Return the draft token of highest score; its confidence is its softmax probability."""
    token = int(scores.argmax())
    return DraftToken(token, float(1.0 / np.exp(scores - scores[token]).sum()), scores)
