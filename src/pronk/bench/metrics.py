"""What the benchmarks report, as pure functions of counts and seconds.

What the engine counts itself, S and the acceptance at each position, is in :class:`pronk.engine.stats.Stats`, also for
the steps of several requests.

Letters: ``α`` is the probability that one guess is accepted, each guess on its own; ``γ`` the number of guesses in a
chain; ``c`` the cost of a draft pass; ``S`` the tokens per pass of the target. A step's ``accepted`` counts its
accepted guesses only. Its tokens are those and the target's own choice after them, so the papers that count accepted
*tokens* have one more.

Sources: *lookahead* is Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead Decoding; *Kangaroo*
is Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting; *GLIDE* is Du et al., GLIDE with
a CAPE. The expected counts go back to Leviathan et al., Fast Inference from Transformers via Speculative Decoding.

Errors: every function raises :class:`~pronk.errors.OptionError` for an argument out of the range that it states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pronk.checks import check_integer, check_number

__all__ = [
    "ctar",
    "ctar_curve",
    "expected_speedup",
    "expected_tokens",
    "inter_token_latencies",
    "repeated_ngrams",
    "spread",
]


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per step of one chain, 1..γ+1: ``(1 - α^(γ+1)) / (1 - α)``. Lookahead, equation 4.

    The target's own token is among them. Computed as the sum ``1 + α + … + α^γ``, which is the same, is the
    limit ``γ + 1`` at ``α = 1``, where the quotient is 0 / 0, and loses no digits beside it.

    Args:
        alpha: probability that a guess is accepted, 0..1.
        gamma: guesses in the chain, at least 0.
    """
    check_number("alpha", alpha, 0, 1)
    check_integer("gamma", gamma, 0)
    return math.fsum(alpha**i for i in range(gamma + 1))


def expected_speedup(alpha: float, gamma: int, cost: float) -> float:
    """Speed over that of plain decoding: ``(1 - α^(γ+1)) / ((1 - α)(γc + 1))``. GLIDE, section 5.1, after Leviathan.

    The tokens of a step over its time, in passes of the target: ``γ`` draft passes and one verification, which is
    taken to cost as much as a plain pass. Below 1 it is a slowdown.

    Args:
        alpha: probability that a guess is accepted, 0..1.
        gamma: guesses per step, at least 0.
        cost: the cost coefficient ``c``, seconds of a draft pass over seconds of a target pass, at least 0.
    """
    check_number("cost", cost, 0)
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def ctar(accepted: Sequence[int], w: int) -> float:
    """Consistent token acceptance rate: share of the steps, 0..1, whose first ``w`` guesses were all accepted.

    ``(1 / steps) Σ [accepted_k ≥ w]``: Kangaroo, definition 1 and equation 2, whose ``s_k - w > 0`` counts the target's
    own token in ``s_k``. All steps count below the line, also those with fewer than ``w`` guesses, so that
    ``1 + CTAR(1) + CTAR(2) + …`` is S.

    Args:
        accepted: accepted guesses of each step, each at least 0, at least one step.
        w: the window, guesses, at least 1.
    """
    check_integer("steps", len(accepted), 1)
    for count in accepted:
        check_integer("accepted", count, 0)
    check_integer("w", w, 1)
    return sum(count >= w for count in accepted) / len(accepted)


def ctar_curve(accepted: Sequence[int], up_to: int) -> list[float]:
    """``CTAR(1) … CTAR(up_to)``, which never rises: see :func:`ctar`; ``up_to`` at least 1. Kangaroo, figure 1a."""
    check_integer("up_to", up_to, 1)
    return [ctar(accepted, w) for w in range(1, up_to + 1)]


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of an output's n-grams, 0..1, that occurred in it before: ``1 - distinct / all``. This project's own.

    Tells how much of a figure may be owed to a text that loops. 0 for an output of fewer than ``n`` tokens.

    Args:
        tokens: the token ids of one output.
        n: tokens per n-gram, at least 1.
    """
    check_integer("n", n, 1)
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def inter_token_latencies(step_seconds: Sequence[float], step_tokens: Sequence[int]) -> list[float]:
    """Seconds per token, in order: a step's wait, shared evenly by the tokens it gave. This project's own.

    The wait of a step that gave none is the next one's; after the last token no one waits, and it is left out. So the
    sum is the time to the last token.

    Args:
        step_seconds: per step, its seconds, finite and at least 0.
        step_tokens: per step, the tokens it gave, at least 0; as many steps.
    """
    latencies: list[float] = []
    wait = 0.0
    for seconds, tokens in zip(step_seconds, step_tokens, strict=True):
        wait += check_number("step_seconds", seconds, 0)
        if check_integer("step_tokens", tokens, 0):
            latencies += [wait / tokens] * tokens
            wait = 0.0
    return latencies


def spread(values: Sequence[float]) -> float:
    """Half the range of repeats, ``(max - min) / 2``, in their unit: what stands behind a ±; of finite numbers."""
    for value in values:
        check_number("values", value)
    return (max(values) - min(values)) / 2
