"""Embeddings beside generations with drafters of the lab."""

import pytest

from engine import test_embeddings as embeddings


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", ["lookahead", "kangaroo", "multi_token"])
def test_same_bits_beside_running_generations(drafter: str, dtype: str) -> None:
    embeddings.test_same_bits_beside_running_generations(drafter, dtype)
