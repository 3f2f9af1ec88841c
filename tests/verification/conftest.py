"""Two models: pronk-tiny, and a random one so small that many verifications take no time."""

import pytest

from checkpoints import MakeCheckpoint
from pronk.llm import LLM


@pytest.fixture(scope="package")
def pronk_tiny() -> LLM:
    return LLM(kv_memory="128MiB", budget="all")


@pytest.fixture(scope="package")
def llm(checkpoint: MakeCheckpoint) -> LLM:
    """In bfloat16, where the two likeliest tokens are often a unit in the last place apart, or less."""
    return LLM(checkpoint("llama"), dtype="bfloat16", kv_memory="32MiB", budget="all")
