"""The likeliest tokens at each node, against a full sort."""

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.drafting import Outcome
from pronk.drafting.shared.likeliest import (
    _likeliest_by_numpy,
    initial_draft_token,
    top_tokens,
)
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree


def outcome(logits: Array, **params: object) -> Outcome[None]:
    tree = TokenTree.chain(range(len(logits)))
    return Outcome(None, tree, (), (), 0, SamplingParams(**params), logits)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", [3, 127, 128, 300, 1000, 8192, 32003])
@pytest.mark.parametrize("count", [1, 2, 4, 32])
@pytest.mark.parametrize("rounded", [FLOAT32, BFLOAT16], ids=str)
def test_likeliest_tokens_equal_a_full_sort(vocab: int, count: int, rounded: DType) -> None:
    """Among equal logits, frequent after rounding to bfloat16, the smallest token ids come
    first.
    """
    logits = (
        np.random.default_rng(vocab).standard_normal((5, vocab)).astype(rounded).astype(np.float32)
    )
    before = logits.copy()
    want = np.argsort(-logits, axis=-1, kind="stable")
    assert top_tokens(outcome(logits), count) == want[:, :count].tolist()
    by_numpy = _likeliest_by_numpy(logits, min(count, vocab))
    assert [row.tolist() for row in by_numpy] == want[:, :count].tolist()
    assert np.array_equal(logits, before)


def test_nan_is_the_least_likely() -> None:
    logits = np.full((1, 300), np.nan, np.float32)
    logits[0, [7, 200]] = -np.inf, 1.0
    assert top_tokens(outcome(logits), 3) == [[200, 0, 1]]


def test_selected_nodes_and_a_logit_bias() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 900), np.float32)
    before = logits.copy()
    whole = top_tokens(outcome(logits), 3)
    assert top_tokens(outcome(logits), 3, [2, 0]) == [whole[2], whole[0]]
    biased = top_tokens(outcome(logits, logit_bias={7: 100.0, whole[1][0]: -100.0}), 2)
    assert all(row[0] == 7 for row in biased)
    assert biased[1][1] == whole[1][1]
    assert np.array_equal(logits, before)


def test_initial_draft_tokens_are_tokens_of_the_prompt() -> None:
    prompt = [5, 6, 7, 8, 9]
    assert {initial_draft_token(prompt, position) for position in range(5)} == set(prompt)
    assert initial_draft_token([3], 10**6) == 3
