"""What the benchmarks report, as pure functions of counts and seconds.

Letters: ``α`` is the probability that one guess is accepted, each guess on its own; ``γ`` the number of guesses in a
chain; ``b`` the number of chains in a step; ``c`` the cost of a draft pass; ``S`` the tokens per pass of the target.
A step's ``accepted`` counts its accepted guesses only. Its tokens are those and the target's own choice after them, so
the papers that count accepted *tokens* have one more.

Sources: *lookahead* is Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead Decoding; *Kangaroo*
is Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting; *GLIDE* is Du et al., GLIDE with
a CAPE. The expected counts go back to Leviathan et al., Fast Inference from Transformers via Speculative Decoding.

Errors: every function raises :class:`~pronk.errors.OptionError` for an argument out of the range that it states.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pronk.errors import OptionError

__all__ = [
    "acceptance_from_compression",
    "acceptance_per_position",
    "acceptance_rate",
    "ctar",
    "ctar_curve",
    "expected_speedup",
    "expected_tokens",
    "expected_tokens_lookahead",
    "expected_tokens_parallel",
    "inter_token_latencies",
    "median",
    "percentile",
    "repeated_ngrams",
    "spread",
    "step_compression",
]

# Halvings of the interval 0..1: a few more than a float just below 1 has digits.
_HALVINGS = 60


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per step of one chain, 1..γ+1: ``(1 - α^(γ+1)) / (1 - α)``. Lookahead, equation 4.

    The target's own token is among them. Computed as the sum ``1 + α + … + α^γ``, which is the same, is the
    limit ``γ + 1`` at ``α = 1``, where the quotient is 0 / 0, and loses no digits beside it.

    Args:
        alpha: probability that a guess is accepted, 0..1.
        gamma: guesses in the chain, at least 0.
    """
    _check_number("alpha", alpha, 0, 1)
    _check_integer("gamma", gamma, 0)
    return math.fsum(alpha**i for i in range(gamma + 1))


def expected_tokens_parallel(alpha: float, gamma: int, b: int) -> float:
    """Tokens per step of the best of ``b`` chains, 1..γ+1: ``(γ + 1) - Σ_{i=1..γ} (1 - α^i)^b``. Lookahead, equation 5.

    The chains are independent: ``(1 - α^i)^b`` is the probability that none has its first ``i`` guesses accepted.

    Args:
        alpha: probability that a guess is accepted, 0..1.
        gamma: guesses in each chain, at least 0.
        b: chains, at least 1; with 1 it is :func:`expected_tokens`.
    """
    _check_number("alpha", alpha, 0, 1)
    _check_integer("gamma", gamma, 0)
    _check_integer("b", b, 1)
    return (gamma + 1) - math.fsum((1 - alpha**i) ** b for i in range(1, gamma + 1))


def expected_tokens_lookahead(alpha: float, gamma: int, b: int, f: float) -> float:
    """S of lookahead decoding, 1..γ+1: ``(f - 1 + E) / f``, ``E`` of equation 5. Lookahead, equation 7.

    One step in ``f`` finds good guesses in the pool of n-grams and gives ``E`` tokens; the other ``f - 1`` find none
    and give one token each. In the paper ``b = W = G`` and ``γ = N - 1``.

    Args:
        alpha: probability that a guess of a good step is accepted, 0..1.
        gamma: guesses in each n-gram, at least 0.
        b: n-grams verified per step, at least 1.
        f: steps per good step, at least 1; a mean, so not always whole.
    """
    _check_number("f", f, 1)
    return (f - 1 + expected_tokens_parallel(alpha, gamma, b)) / f


def expected_speedup(alpha: float, gamma: int, cost: float) -> float:
    """Speed over that of plain decoding: ``(1 - α^(γ+1)) / ((1 - α)(γc + 1))``. GLIDE, section 5.1, after Leviathan.

    The tokens of a step over its time, in passes of the target: ``γ`` draft passes and one verification, which is
    taken to cost as much as a plain pass. Below 1 it is a slowdown.

    Args:
        alpha: probability that a guess is accepted, 0..1.
        gamma: guesses per step, at least 0.
        cost: the cost coefficient ``c``, seconds of a draft pass over seconds of a target pass, at least 0.
    """
    _check_number("cost", cost, 0)
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def acceptance_from_compression(compression: float, gamma: int) -> float:
    """The ``α``, 0..1, whose :func:`expected_tokens` are ``compression``. Lookahead, equation 4, solved by bisection.

    Compares papers that report S only, as if their guesses were equally good at every depth.

    Args:
        compression: S, tokens per step, 1..γ+1.
        gamma: guesses in the chain, at least 1.
    """
    _check_integer("gamma", gamma, 1)
    _check_number("compression", compression, 1, gamma + 1)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if expected_tokens(middle, gamma) < compression:
            low = middle
        else:
            high = middle
    return high


def ctar(accepted: Sequence[int], w: int) -> float:
    """Consistent token acceptance rate: share of the steps, 0..1, whose first ``w`` guesses were all accepted.

    ``(1 / steps) Σ [accepted_k ≥ w]``: Kangaroo, definition 1 and equation 2, whose ``s_k - w > 0`` counts the target's
    own token in ``s_k``. All steps count below the line, also those with fewer than ``w`` guesses, so that
    ``1 + CTAR(1) + CTAR(2) + …`` is S.

    Args:
        accepted: accepted guesses of each step, each at least 0, at least one step.
        w: the window, guesses, at least 1.
    """
    _check_some("accepted", accepted)
    _check_counts("accepted", accepted)
    _check_integer("w", w, 1)
    return sum(count >= w for count in accepted) / len(accepted)


def ctar_curve(accepted: Sequence[int], up_to: int) -> list[float]:
    """``CTAR(1) … CTAR(up_to)``, which never rises: see :func:`ctar`; ``up_to`` at least 1. Kangaroo, figure 1a."""
    _check_integer("up_to", up_to, 1)
    return [ctar(accepted, w) for w in range(1, up_to + 1)]


def acceptance_per_position(offered_depths: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """At position ``i`` (from 0): share of the steps with a guess at depth ``i + 1`` whose guess there was accepted.

    ``Σ [accepted_k > i] / Σ [depth_k > i]``, each 0..1, as in the engine's statistics. A guess behind a rejected one
    counts as rejected, so with steps of one depth position ``i`` expects ``α^(i+1)``. Unlike :func:`ctar` it leaves out
    steps that offered no guess there. One share per position up to the deepest offer; each of them was offered at
    least once, so the list has no holes, and it is empty if nothing was offered.

    Args:
        offered_depths: per step, how deep its guesses went, at least 0.
        accepted: per step, accepted guesses, 0..depth; as many steps.
    """
    _check_counts("offered_depths", offered_depths)
    _check_counts("accepted", accepted, offered_depths)
    for depth, count in zip(offered_depths, accepted, strict=True):
        if count > depth:
            msg = f"accepted: expected at most the {depth} that the step offered, found {count}"
            raise OptionError(msg)
    return [
        sum(count > i for count in accepted) / sum(depth > i for depth in offered_depths)
        for i in range(max(offered_depths, default=0))
    ]


def acceptance_rate(offered_depths: Sequence[int], accepted: Sequence[int]) -> float | None:
    """``α`` as measured, 0..1: accepted over offered guesses at the first position. GLIDE, section 5.1.

    The first position only, as what is behind a rejected guess was not tried. ``None`` if no step had a guess. The
    arguments are those of :func:`acceptance_per_position`.
    """
    shares = acceptance_per_position(offered_depths, accepted)
    return shares[0] if shares else None


def step_compression(tokens: int, steps: int) -> float:
    """S: ``tokens / steps``, tokens per pass of the target. Lookahead, equation 6; Kangaroo, equation 1.

    Plain decoding has 1, if the pass that chose the first token and that token are counted both or neither.

    Args:
        tokens: generated tokens, at least 0.
        steps: passes of the target that chose tokens, at least 1.
    """
    _check_integer("tokens", tokens, 0)
    _check_integer("steps", steps, 1)
    return tokens / steps


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of an output's n-grams, 0..1, that occurred in it before: ``1 - distinct / all``. This project's own.

    Tells how much of a figure may be owed to a text that loops. 0 for an output of fewer than ``n`` tokens.

    Args:
        tokens: the token ids of one output.
        n: tokens per n-gram, at least 1.
    """
    _check_integer("n", n, 1)
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
    for seconds in step_seconds:
        _check_number("step_seconds", seconds, 0)
    _check_counts("step_tokens", step_tokens, step_seconds)
    latencies: list[float] = []
    wait = 0.0
    for seconds, tokens in zip(step_seconds, step_tokens, strict=True):
        wait += seconds
        if tokens:
            latencies += [wait / tokens] * tokens
            wait = 0.0
    return latencies


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile, in the values' unit: what stands at rank ``(n - 1) q / 100`` of them, sorted from 0.

    Between two ranks it lies on the straight line, the rule that NumPy calls linear.

    Args:
        values: finite numbers, at least one, in any order.
        q: percent, 0 (the least value) to 100 (the greatest).
    """
    _check_values(values)
    _check_number("q", q, 0, 100)
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def median(values: Sequence[float]) -> float:
    """The middle of at least one finite number, in their unit; the mean of the middle two if their count is even."""
    _check_values(values)
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half the range of repeats, ``(max - min) / 2``, in their unit: what stands behind a ±; at least one, finite."""
    _check_values(values)
    return (max(values) - min(values)) / 2


def _check_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        msg = f"{name}: expected an integer of at least {least}, found {value!r}"
        raise OptionError(msg)


def _check_number(name: str, value: float, least: float = -math.inf, most: float = math.inf) -> None:
    # nan and the infinities fail, as no mean or ratio of them says anything.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not least <= value <= most:
        wanted = "a finite number" if least == -math.inf else f"a finite number of at least {least}"
        wanted = f"a number in {least}..{most}" if most < math.inf else wanted
        msg = f"{name}: expected {wanted}, found {value!r}"
        raise OptionError(msg)


def _check_counts(name: str, values: Sequence[int], steps: Sequence[float] | None = None) -> None:
    if steps is not None and len(values) != len(steps):
        msg = f"{name}: expected one value for each of {len(steps)} steps, found {len(values)}"
        raise OptionError(msg)
    for value in values:
        _check_integer(name, value, 0)


def _check_values(values: Sequence[float]) -> None:
    _check_some("values", values)
    for value in values:
        _check_number("values", value)


def _check_some(name: str, values: Sequence[float]) -> None:
    if not values:
        msg = f"{name}: expected at least one value, found none"
        raise OptionError(msg)
