"""``LLM`` with drafters of the lab."""

import pytest

import test_llm
from checkpoints import MakeCheckpoint
from pronk import LLM
from pronk.testing import assert_lossless


@pytest.fixture(scope="module")
def llm(checkpoint: MakeCheckpoint) -> LLM:
    return LLM(checkpoint("llama"), budget="all")


@pytest.mark.parametrize("drafter", ["jacobi", "lookahead(window=3)"])
def test_a_bias_may_be_a_whole_number(llm: LLM, drafter: str) -> None:
    test_llm.test_a_bias_may_be_a_whole_number(llm, drafter)


def test_a_composite_is_lossless(llm: LLM) -> None:
    assert_lossless(
        llm, "merged(prompt_lookup, jacobi)", ["def f(x):\n    return x\n\ndef f(x):\n"]
    )
