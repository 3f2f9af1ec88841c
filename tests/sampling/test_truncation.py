"""Truncation in the library and in NumPy: the same tokens."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from pronk.kernels.exact_math import find_library
from pronk.sampling import truncation
from pronk.sampling.params import SamplingParams
from pronk.sampling.truncation import truncate

SIZES = (1, 63, 600, 5003)
OPTIONS = [*product((0, 1, 40, 600, 10**9), (1.0, 0.01, 0.9, 0.9999), (0.0, 0.1, 1.0))]


def random_scores(dice: random.Random, size: int) -> truncation.Floats:
    """Return scores, some of them equal or banned."""
    numbers = np.random.default_rng(dice.randrange(2**32)).normal(size=size)
    steps = dice.choice([1, 16, 1e6])
    scores = (np.round(numbers * steps) / steps * dice.choice([0.1, 3.0, 20.0])).astype(np.float32)
    banned = [token for token in range(size) if dice.random() < 0.2]
    scores[banned[: size - 1]] = -np.inf
    return scores


@pytest.mark.parametrize("size", SIZES)
def test_the_library_keeps_the_tokens_of_numpy(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_library() is not None
    dice = random.Random(size)
    counts = set[int]()
    for top_k, top_p, min_p in OPTIONS:
        scores = random_scores(dice, size)
        params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        kept, ids = truncate(scores, params)
        with monkeypatch.context() as patch:
            patch.setattr(truncation, "find_library", lambda: None)
            numpy_kept, numpy_ids = truncate(scores, params)
        assert ids.tolist() == numpy_ids.tolist(), params
        assert kept.tolist() == numpy_kept.tolist()
        counts.add(len(ids))
    assert min(counts) == 1
    assert len(counts) > 5 or size == 1
