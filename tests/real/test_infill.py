"""A real model for code fills in the middle; one for conversations is refused."""

import pytest

from pronk.base.errors import OptionError
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.text.infill import ContextFile

PREFIX = "def add(a, b):\n    return "
SUFFIX = "\n\nprint(add(1, 2))\n"
CHECK = 'def check(amount):\n    if amount <= 0:\n        raise ValueError("expected a sum")\n'


def test_the_middle_fits_between_prefix_and_suffix(llm: LLM, name: str) -> None:
    params = SamplingParams(max_tokens=16)
    if name == "smollm2":
        with pytest.raises(OptionError, match="expected a model with tokens for filling in"):
            llm.infill(PREFIX, SUFFIX, params)
        return
    assert llm.infill(PREFIX, SUFFIX, params).text.startswith("a + b")


@pytest.mark.slow
def test_auto_drafts_from_the_files_of_context(llm: LLM, name: str) -> None:
    if name == "smollm2":
        pytest.skip("the model has no tokens for filling in the middle")
    context = [ContextFile(CHECK, "check.py")]
    params = SamplingParams(max_tokens=24)
    prefix = "def check(amount):\n    if amount"
    plain = llm.infill(prefix, "", params, context=context, drafter="autoregressive")
    done = llm.infill(prefix, "", params, context=context, drafter="auto")
    assert done.token_ids == plain.token_ids
    assert done.text.startswith(" <= 0:\n        raise ValueError(")
    assert done.stats.sources["suffix"].accepted > 0
