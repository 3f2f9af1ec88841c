import math
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product

import pytest

from pronk.engine.stats import Stats, StepStats
from pronk.lab.bench import metrics

# GLIDE, table 1, gamma 5: draft and target, cost in %, then (acceptance in %, expected speed-up)
# for GSM8K, Finance-Alpaca, Spider and Code-Search-Python.
GLIDE = [
    ("LLAMA-68m, Vicuna-7B", 7.7, [(51.6, 1.46), (49.7, 1.41), (19.2, 0.89), (34.8, 1.11)]),
    ("LLAMA-160m, Vicuna-7B", 49.0, [(58.0, 0.66), (57.1, 0.65), (25.1, 0.38), (40.0, 0.48)]),
    ("GLIDE, Vicuna-7B", 6.7, [(64.8, 1.97), (63.2, 1.90), (55.7, 1.64), (67.0, 2.06)]),
    ("LLAMA-68m, Vicuna-13B", 6.2, [(50.2, 1.51), (49.3, 1.48), (19.0, 0.94), (32.7, 1.13)]),
    ("LLAMA-160m, Vicuna-13B", 39.3, [(56.8, 0.75), (56.8, 0.75), (25.4, 0.45), (38.3, 0.54)]),
    ("GLIDE, Vicuna-13B", 5.5, [(67.1, 2.16), (65.0, 2.07), (57.1, 1.77), (68.6, 2.24)]),
    ("LLAMA-68m, Vicuna-33B", 4.6, [(49.1, 1.57), (46.5, 1.50), (30.0, 1.16), (31.5, 1.19)]),
    ("LLAMA-160m, Vicuna-33B", 29.5, [(56.1, 0.89), (53.1, 0.84), (31.4, 0.59), (36.7, 0.64)]),
    ("GLIDE, Vicuna-33B", 6.8, [(69.3, 2.16), (64.3, 1.94), (62.7, 1.87), (68.9, 2.14)]),
    ("LLAMA-45m, Mistral-7B", 4.9, [(36.7, 1.27), (40.2, 1.34), (41.9, 1.38), (44.5, 1.44)]),
    ("GLIDE, Mistral-7B", 6.6, [(60.1, 1.80), (56.4, 1.67), (59.8, 1.79), (62.6, 1.89)]),
]

# Multi-token prediction, table S2: tokens per forward pass with 1, 2, 3 and 4 heads.
HEADS = {
    "wikipedia": (1, 1.88, 2.57, 3.12),
    "books": (1, 1.87, 2.56, 3.09),
    "code": (1, 1.94, 2.78, 3.5),
}

# Accepted draft tokens of 8 steps, and the draft depth of each step.
ACCEPTED = [0, 3, 1, 0, 2, 3, 0, 1]
DEPTHS = [3, 3, 3, 0, 2, 4, 1, 3]


def steps(depths: Sequence[int], accepted: Sequence[int]) -> Stats:
    """Return the engine's statistics of steps with these draft depths and numbers of accepted draft
    tokens.
    """
    made = [
        StepStats(d + 1, d, d, a, a + 1, 0.0, 0.0, 0.0)
        for d, a in zip(depths, accepted, strict=True)
    ]
    return Stats(steps=made, generated_tokens=sum(step.tokens for step in made))


def enumerated(alpha: Fraction, gamma: int) -> Fraction:
    """Return the exact mean of a step's tokens: sum over all outcomes of a chain of ``gamma`` draft
    tokens.
    """
    mean = Fraction(0)
    for outcome in product((True, False), repeat=gamma):
        weight = math.prod((alpha if hit else 1 - alpha for hit in outcome), start=Fraction(1))
        mean += weight * ((*outcome, False).index(False) + 1)
    return mean


@pytest.mark.parametrize(
    "alpha", [Fraction(0), Fraction(1, 7), Fraction(17, 40), Fraction(9, 10), Fraction(1)]
)
@pytest.mark.parametrize("gamma", [0, 1, 5, 9])
def test_expected_tokens_are_the_mean_over_all_outcomes(alpha: Fraction, gamma: int) -> None:
    """Compare with an enumeration of all outcomes, and with the quotient of Lookahead, equation
    4.
    """
    tokens = metrics.expected_tokens(float(alpha), gamma)
    assert tokens == pytest.approx(float(enumerated(alpha, gamma)), rel=1e-13)
    assert 1 <= tokens <= gamma + 1
    if alpha < 1:
        assert tokens == pytest.approx(float((1 - alpha ** (gamma + 1)) / (1 - alpha)), rel=1e-13)


def test_expected_tokens_are_precise_near_certain_acceptance() -> None:
    """Equation 4 as a quotient is 0 / 0 at α = 1, with an error of 4e-10 just below; the sum is
    exact at both α.
    """
    beside = 1 - 2e-8 / 3
    exact = float(sum(Fraction(beside) ** i for i in range(8)))
    assert (1 - beside**8) / (1 - beside) != pytest.approx(exact, rel=1e-10)
    assert metrics.expected_tokens(beside, 7) == pytest.approx(exact, rel=1e-15)
    assert metrics.expected_tokens(1.0, 7) == 8


@pytest.mark.parametrize(
    ("cost", "cells"), [row[1:] for row in GLIDE], ids=[row[0] for row in GLIDE]
)
def test_expected_tokens_give_the_speedup_that_glide_prints(
    cost: float, cells: list[tuple[float, float]]
) -> None:
    """GLIDE, table 1, all cells. Some are cut off, not rounded (1.879 is printed as 1.87), hence a
    whole hundredth.
    """
    for acceptance, printed in cells:
        assert metrics.expected_tokens(acceptance / 100, 5) / (5 * cost / 100 + 1) == pytest.approx(
            printed, abs=0.01
        )


@pytest.mark.parametrize("task", HEADS)
def test_ctar_of_published_figures(task: str) -> None:
    """Multi-token prediction, table S2: what head k adds to S is CTAR(k - 1), as S = 1 + Σ CTAR
    (Kangaroo, eq. 1, 2).

    A hundred steps that agree with the table (for code the text has 2.5 accepted draft tokens out
    of 3): 94 steps accept the first draft token, 84 of them the second too, 72 all three.
    """
    added = [round(100 * (high - low)) for low, high in pairwise(HEADS[task])]
    accepted = [sum(step < share for share in added) for step in range(100)]
    assert metrics.ctar_curve(accepted, 3) == pytest.approx([share / 100 for share in added])
    assert steps([3] * 100, accepted).step_compression == pytest.approx(HEADS[task][3])


def test_ctar_counts_all_steps() -> None:
    """Kangaroo, equation 2, with its s_k = accepted + 1."""
    expected = [sum((count + 1) - w > 0 for count in ACCEPTED) / 8 for w in range(1, 6)]
    assert metrics.ctar_curve(ACCEPTED, 5) == expected
    assert metrics.ctar_curve(ACCEPTED, 4) == [5 / 8, 3 / 8, 2 / 8, 0]
    assert 1 + sum(metrics.ctar_curve(ACCEPTED, 4)) == steps(DEPTHS, ACCEPTED).step_compression


def test_measured_and_expected_agree_on_simulated_steps() -> None:
    """Kangaroo's CTAR(w) of a chain with equal acceptance is α^w; 4 standard errors of 40,000 steps
    are 0.01.
    """
    rng = random.Random(7)
    alpha = 0.6
    gamma = 5
    count = 40_000
    runs = [next((i for i in range(gamma) if rng.random() >= alpha), gamma) for _ in range(count)]
    stats = steps([gamma] * count, runs)
    curve = metrics.ctar_curve(runs, gamma)
    assert curve == pytest.approx([alpha**w for w in range(1, gamma + 1)], abs=0.01)
    assert stats.acceptance == curve
    assert stats.step_compression == pytest.approx(metrics.expected_tokens(alpha, gamma), abs=0.04)


def test_repeated_ngrams_by_hand() -> None:
    # 1234 2341 3412 4123 and then 1234 again: one of five.
    assert metrics.repeated_ngrams([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert metrics.repeated_ngrams([7] * 13) == pytest.approx(9 / 10)
    assert metrics.repeated_ngrams([5, 6, 5, 6, 7], n=2) == pytest.approx(1 / 4)
    assert metrics.repeated_ngrams([5, 5, 6], n=1) == pytest.approx(1 / 3)
    assert metrics.repeated_ngrams(range(50)) == 0
    assert metrics.repeated_ngrams([1, 2, 3]) == metrics.repeated_ngrams([]) == 0


def test_repeated_ngrams_against_a_scan() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(3) for _ in range(60)]
    for n in (1, 2, 3, 4):
        grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
        seen = sum(gram in grams[:i] for i, gram in enumerate(grams))
        assert metrics.repeated_ngrams(tokens, n) == pytest.approx(seen / len(grams))


def test_the_tokens_of_a_step_share_its_time() -> None:
    assert metrics.inter_token_latencies([0.5, 0.3, 0.2], [1, 3, 2]) == pytest.approx(
        [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
    )
    # A step without tokens makes the next one's wait longer; after the last token no one waits.
    assert metrics.inter_token_latencies([0.5, 0.25, 0.25, 9.0], [1, 0, 2, 0]) == [0.5, 0.25, 0.25]
    assert metrics.inter_token_latencies([], []) == []


def test_latencies_keep_count_and_time() -> None:
    rng = random.Random(5)
    seconds = [rng.random() for _ in range(50)]
    tokens = [rng.randrange(5) for _ in range(49)] + [1]
    latencies = metrics.inter_token_latencies(seconds, tokens)
    assert len(latencies) == sum(tokens)
    assert sum(latencies) == pytest.approx(sum(seconds))
