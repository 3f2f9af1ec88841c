"""Two models: pronk-tiny, and a random model that is small enough for many fast verifications."""

import pytest

from checkpoints import MakeCheckpoint
from pronk.llm import LLM


@pytest.fixture(scope="package")
def pronk_tiny() -> LLM:
    return LLM(kv_memory="128MiB", budget="all")


@pytest.fixture(scope="package")
def llm(checkpoint: MakeCheckpoint) -> LLM:
    """Return a bfloat16 model, whose two largest logits often differ by at most a unit in the last
    place.
    """
    return LLM(checkpoint("llama"), dtype="bfloat16", kv_memory="32MiB", budget="all")
