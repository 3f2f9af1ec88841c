"""Formulas of speculative decoding, as pure functions of counts and seconds.

Symbols:

- ``α``: probability that one draft token is accepted, independent of the others
- ``γ``: number of draft tokens in a chain
- ``c``: time of a forward pass of the drafter, divided by that of the target model
- ``S``: mean number of tokens per forward pass of the target model

``accepted`` counts accepted draft tokens only. A step yields one token more, the target model's
own; papers that count accepted *tokens* include that token. The engine itself counts S and the
acceptance rate by depth (:class:`pronk.serving.Stats`).

Sources: *lookahead* is Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead
Decoding; *Kangaroo* is Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early
Exiting; *GLIDE* is Du et al., GLIDE with a CAPE. The expected tokens are from Leviathan et al.,
Fast Inference from Transformers via Speculative Decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the expected number of tokens per step with a chain of ``gamma`` draft tokens.

    Lookahead, equation 4: ``(1 - α^(γ+1)) / (1 - α)``. The target model's own token is included.
    The code adds ``1 + α + … + α^γ``, an equal sum without a division by zero at ``α = 1``.

    A step takes as long as ``γc + 1`` forward passes of plain decoding. The expected speed-up is
    therefore the expected number of tokens divided by ``γc + 1`` (GLIDE, section 5.1).
    """
    return math.fsum(alpha**i for i in range(gamma + 1))


def ctar_curve(accepted: Sequence[int], up_to: int) -> list[float]:
    """Return ``CTAR(w)``, the share of steps whose first w draft tokens were accepted, w = 1…up_to.

    ``CTAR(w) = (1 / steps) Σ [accepted ≥ w]``, a falling curve (Kangaroo, definition 1, equation 2,
    figure 1a; the paper writes ``s_k - w > 0`` for ``accepted ≥ w``, because its ``s_k`` counts the
    target model's own token, too). A step with fewer than ``w`` draft tokens counts as ``accepted <
    w``, so that ``1 + CTAR(1) + CTAR(2) + …`` is S. ``accepted`` has the number of accepted draft
    tokens of each step; at least one step is needed.
    """
    return [sum(count >= w for count in accepted) / len(accepted) for w in range(1, up_to + 1)]


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Return the share (0..1) of an output's n-grams that occurred before in that output.

    The share is ``1 - distinct / all``.
    A high share means that the text loops, which favours drafters that copy. An output of fewer
    than ``n`` tokens gives 0.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def inter_token_latencies(step_seconds: Sequence[float], step_tokens: Sequence[int]) -> list[float]:
    """Return the latency of each token in seconds, from the seconds and tokens of each step.

    The time of a step is divided equally among its tokens. The time of a step without tokens is
    added to the next step. The time after the last token is dropped, so that the sum is the time to
    the last token.
    """
    latencies: list[float] = []
    wait = 0.0
    for seconds, tokens in zip(step_seconds, step_tokens, strict=True):
        wait += seconds
        if tokens:
            latencies += [wait / tokens] * tokens
            wait = 0.0
    return latencies
