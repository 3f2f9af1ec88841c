"""pronk-tiny with drafters of the lab."""

import pytest

from pronk import LLM
from test_pronk_tiny import tokens_per_pass


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_per_forward_pass_with_the_draft_model(temperature: float) -> None:
    """Trees of draft tokens give more tokens per forward pass than chains."""
    drafters = ["draft_model(num_tokens=4)", "staged(num_nodes=20)", "cape"]
    chain, tree, _ = tokens_per_pass(LLM(budget="all"), temperature, drafters)
    assert tree > chain
