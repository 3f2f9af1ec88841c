"""The exact distribution of short sampled strings: its cells, and the cell of a string."""

import math

import pytest

from lab.verification.cases import some_prompts
from pronk.lab.verification.exact_distribution import (
    DRAW,
    NUM_TESTED_TOKENS,
    OTHER,
    ExactDistribution,
    choose_extended,
)
from pronk.lab.verification.prompts import NamedPrompt
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams


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
