"""Pearson's chi-square test: quantiles, merged cells, and the share of correct samples that fail.

The exact distribution of short sampled strings: its cells, and the cell of a string.
"""

import math

import numpy as np
import pytest

from lab.verification.cases import some_prompts
from pronk.lab.verification.distribution import (
    DRAW,
    MIN_EXPECTED,
    NUM_TESTED_TOKENS,
    OTHER,
    ExactDistribution,
    chi_square,
    choose_extended,
    merge_small,
    p_value,
)
from pronk.lab.verification.prompts import NamedPrompt
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams

# Quantiles from tables of the chi-square distribution: (statistic, degrees of freedom, p-value).
CRITICAL = [(3.841459, 1, 0.05), (9.487729, 4, 0.05), (23.209251, 10, 0.01), (37.697298, 15, 0.001)]


@pytest.mark.parametrize(("statistic", "freedom", "probability"), CRITICAL)
def test_known_quantiles(statistic: float, freedom: int, probability: float) -> None:
    assert p_value(statistic, freedom) == pytest.approx(probability, rel=1e-5)


def test_extremes() -> None:
    assert p_value(0.0, 3) == 1.0
    assert p_value(1e4, 3) == 0.0
    assert p_value(5.0, 0) == 1.0
    assert p_value(60.0, 14) == pytest.approx(1.2e-7, rel=0.1)


def test_large_degrees_of_freedom() -> None:
    """Near the mean, the distribution approaches a normal one."""
    for freedom in (10_000, 100_000):
        for deviations in (-6.0, -1.0, 0.0, 1.0, 6.0):
            statistic = freedom + deviations * (2 * freedom) ** 0.5
            assert p_value(statistic, freedom) == pytest.approx(
                math.erfc(deviations / 2**0.5) / 2, abs=0.005
            )


def test_statistic_by_hand() -> None:
    assert chi_square([12, 8], [10, 10]) == (pytest.approx(0.8), 1)


def test_small_cells_are_merged_from_the_smallest_on() -> None:
    observed, expected = merge_small([100, 3, 0, 2, 7], [90.0, 1.0, 2.0, 3.0, 6.0])
    assert expected == [6.0, 6.0, 90.0]
    assert observed == [5, 7, 100]
    assert merge_small([1, 2], [1.0, 2.0]) == ([3], [3.0])  # even the sum is below MIN_EXPECTED
    # a small remainder joins the largest cell
    assert merge_small([0, 4, 50], [0.0, 4.0, 50.0]) == ([54], [54.0])
    _, expected = merge_small([0] * 30, [float(n) / 3 for n in range(30)])
    assert min(expected) >= MIN_EXPECTED
    assert sum(expected) == pytest.approx(sum(range(30)) / 3)


def test_p_values_of_correct_samples_are_uniform() -> None:
    dice = np.random.default_rng(0)
    probs = np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.019, 0.001])
    values = []
    for _ in range(400):
        merged = merge_small(dice.multinomial(500, probs).tolist(), (500 * probs).tolist())
        values.append(p_value(*chi_square(*merged)))
    assert 0.02 < sum(value < 0.05 for value in values) / 400 < 0.08
    assert 0.42 < sum(value < 0.5 for value in values) / 400 < 0.58


@pytest.fixture(scope="module")
def exact(llm: LLM) -> ExactDistribution:
    found = choose_extended(llm, some_prompts(llm)[:2])
    assert found is not None
    return found


def test_cells_are_a_distribution(exact: ExactDistribution) -> None:
    assert len(exact.cells) == 15
    assert sum(exact.cells.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(p >= 0.0 for p in exact.cells.values())
    assert exact.information > 0.0


def test_cells_from_log_probabilities(llm: LLM, exact: ExactDistribution) -> None:
    """Cells have the probabilities from ``prompt_logprobs`` of whole strings, with top-k applied
    here.
    """
    names = [cell for cell in exact.cells if OTHER not in cell]
    assert len(names) == 2**NUM_TESTED_TOKENS
    for cell in names:
        text = [*exact.prompt.ids, *cell]
        done = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=8))
        assert done.prompt_logprobs is not None
        probability = 1.0
        for token, report in zip(cell, done.prompt_logprobs[-NUM_TESTED_TOKENS:], strict=True):
            assert report is not None
            likely = sorted(report.values(), reverse=True)[: DRAW.top_k]
            assert report[token] in likely
            weights = [math.exp(value / DRAW.temperature) for value in likely]
            probability *= math.exp(report[token] / DRAW.temperature) / sum(weights)
        assert exact.cells[cell] == pytest.approx(probability, rel=1e-4)


def test_cell_of_a_string() -> None:
    cells = {(1,): 0.0, (1, 2, 3): 0.25, (1, 2, OTHER): 0.25, (1, OTHER): 0.25, (OTHER,): 0.25}
    possible = {(): frozenset({1, 4}), (1,): frozenset({2, 5}), (1, 2): frozenset({3, 6})}
    exact = ExactDistribution(NamedPrompt("x", [0]), cells, possible)
    assert exact.cell([1, 2, 3]) == (1, 2, 3)
    assert exact.cell([1, 2, 6]) == (1, 2, OTHER)
    assert exact.cell([1, 5, 9]) == (1, OTHER)
    assert exact.cell([4, 9, 9]) == (OTHER,)
    assert exact.cell([1, 2, 9]) is None
    assert exact.cell([9, 2, 3]) is None


def test_no_distribution_if_the_context_is_too_short(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some_prompts(llm)[1:]
    size = len(prompts[0].ids)
    monkeypatch.setattr(llm, "config", _Short(size + NUM_TESTED_TOKENS))
    assert choose_extended(llm, prompts) is None


class _Short:
    """A config with nothing but a context length."""

    def __init__(self, context: int) -> None:
        self.context = context
