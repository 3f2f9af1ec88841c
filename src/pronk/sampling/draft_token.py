"""Draft tokens chosen from a draft model's logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DraftToken", "argmax_token"]


@dataclass(frozen=True)
class DraftToken:
    """A token that a draft model proposes.

    Attributes:
        token: proposed token id.
        confidence: maximum of softmax(``scores``), in (0, 1]. If ``scores`` has no noise, it is max p, where p is the
            draft model's distribution. With noise, the confidence varies: for one distribution with max p = 0.59, at
            T = 0.8, its mean is 0.634 and its standard deviation 0.186.
        scores: ``[vocab]``: log p up to a constant, plus the target's Gumbel noise if the temperature is above 0 and
            the rule is coupled. Higher is likelier to be the target's token. ``-inf`` excludes a token.
        q: ``[vocab]`` float64 distribution from which ``token`` was drawn; ``None`` if ``token`` is the argmax of
            ``scores``.
    """

    token: int
    confidence: float
    scores: NDArray[np.floating[Any]]
    q: NDArray[np.float64] | None = None

    def top_tokens(self, count: int) -> list[tuple[int, float]]:
        """Return (token, softmax(``scores``)) of the ``count`` best tokens, best first, without probability 0."""
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
    """Return the argmax of ``scores`` as a draft token."""
    token = int(scores.argmax())
    return DraftToken(token, float(1.0 / np.exp(scores - scores[token]).sum()), scores)
