"""Embeddings by several processes."""

import numpy as np
import pytest

from engine.test_embeddings import TEXTS, TOLERANCE
from pronk import LLM


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("parallel", ["tree", "tensor"])
def test_workers(parallel: str) -> None:
    one = LLM(threads=1, dtype="float32")
    two = LLM(threads=1, dtype="float32", workers=2, parallel=parallel)
    try:
        for pooling in ("mean", "last"):
            want, found = (llm.embed(TEXTS, pooling=pooling) for llm in (one, two))  # type: ignore[arg-type]
            if parallel == "tree":
                assert found.tobytes() == want.tobytes()
            assert np.abs(found - want).max() < TOLERANCE
    finally:
        two.close()
