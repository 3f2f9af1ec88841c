"""Draft tokens chosen from a draft model's logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array
from pronk.kernels.exact_math import exp, total

DraftIds = NDArray[np.int32]  # ``[draft vocab]``: the target's token id of each draft logit


class DraftLogits(NamedTuple):
    """A drafter's logits of the next token.

    Attributes:
        values: float32 ``[draft vocab]``.
        ids: the target's token id of each logit; ``None``: logit i is that of token i.
    """

    values: Array
    ids: DraftIds | None = None


class DraftToken(NamedTuple):
    """A token that a draft model proposes.

    Attributes:
        token: proposed token id.
        confidence: maximum of softmax(``scores``), in (0, 1]. If ``scores`` has no noise, it is max
            p, where p is the draft model's distribution. With noise, the confidence varies: for one
            distribution with max p = 0.59, at T = 0.8, its mean is 0.634 and its standard deviation
            0.186.
        scores: ``[draft vocab]``: log p up to a constant, plus the target's Gumbel noise if the
            temperature is above 0 and the rule is coupled. Higher is likelier to be the target's
            token. ``-inf`` excludes a token.
        ids: the target's token id of each score; ``None`` for 0, 1, ….
        q: ``[vocab]`` float64 distribution from which ``token`` was drawn; ``None`` if ``token`` is
            the argmax of ``scores``.
    """

    token: int
    confidence: float
    scores: NDArray[np.floating[Any]]
    ids: DraftIds | None = None
    q: NDArray[np.float64] | None = None

    def top_tokens(self, count: int) -> list[tuple[int, float]]:
        """Return the ``count`` best tokens with their probabilities, best first.

        The probabilities are those of softmax(``scores``); tokens of probability 0 are left out.
        """
        remaining = self.scores.copy()
        best = list[tuple[int, float]]()
        # For up to about a dozen tokens, repeated argmax is faster than a partition.
        for _ in range(min(count, len(remaining))):
            index = int(remaining.argmax())
            if remaining[index] == -math.inf:
                break
            token = index if self.ids is None else int(self.ids[index])
            best.append((token, float(remaining[index])))
            remaining[index] = -math.inf
        differences = [score - best[0][1] for _, score in best]
        probs = (self.confidence * exp(differences)).tolist()
        return [(token, prob) for (token, _), prob in zip(best, probs, strict=True) if prob > 0.0]


def argmax_token(scores: NDArray[np.floating[Any]]) -> DraftToken:
    """Return the token with the highest of ``scores`` (``[vocab]``) as a draft token."""
    token = int(scores.argmax())
    weights = exp(scores - scores[token])
    return DraftToken(token, 1.0 / total(weights), scores)
