"""Guided texts: the engine's tests with drafters of the lab."""

import pytest

from engine import test_guided as guided
from pronk import LLM


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, prefix_cache=True, budget="all")


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["lookahead", "medusa", "cape"])
def test_texts_fit_by_every_rule(llm: LLM, name: str, rule: str) -> None:
    guided.test_texts_fit_by_every_rule(llm, name, rule)


def test_texts_have_one_end_without_the_model(llm: LLM) -> None:
    guided.test_texts_have_one_end_without_the_model(llm, "medusa")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lookahead", "medusa", "kangaroo"])
def test_texts_fit_in_fewer_passes(llm: LLM, name: str) -> None:
    guided.TestJump().test_texts_fit_in_fewer_passes(llm, name)
