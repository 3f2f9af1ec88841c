"""The LM head in two stages: which tokens get logits, and which bits these have."""

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.drafting import TwoStageHead
from pronk.models.linear import Linear, WeightLayout, choose_linear
from tiny_models import kernels

HIDDEN = 32
CLUSTERS = 7
SIZE = 5  # tokens of a cluster; not a multiple of the kernels' blocks of outputs
VOCAB = CLUSTERS * SIZE
dice = np.random.default_rng(0)
WEIGHT = dice.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
CENTROIDS = dice.standard_normal((CLUSTERS, HIDDEN)).astype(np.float32)
TOKENS = dice.permutation(VOCAB).reshape(CLUSTERS, SIZE)
ROWS = dice.standard_normal((6, HIDDEN)).astype(np.float32)


def linear(weight: Array, dtype: DType = FLOAT32, weights: str = "plain") -> Linear:
    build = choose_linear(kernels(), weights)
    return build(weight.astype(dtype), None, WeightLayout(head=True))


def split(head: Linear, num_best: int, dtype: DType = FLOAT32) -> TwoStageHead:
    return TwoStageHead.split(head, linear(CENTROIDS, dtype), TOKENS, num_best)


@pytest.mark.parametrize("weights", ["plain", "int8"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_logits_have_the_bits_of_the_whole_head(dtype: DType, weights: str) -> None:
    head = linear(WEIGHT, dtype, weights)
    rows = ROWS.astype(dtype)
    found = split(head, 3, dtype).logits(rows)
    for row, whole in zip(found, head.logits(rows), strict=True):
        assert row.ids is not None
        assert len(row.values) == 3 * SIZE
        np.testing.assert_array_equal(row.values, whole[row.ids])


def test_the_best_clusters_are_chosen_for_each_row() -> None:
    for row, hidden in zip(split(linear(WEIGHT), 2).logits(ROWS), ROWS, strict=True):
        best = np.argsort(CENTROIDS @ hidden)[-2:]
        assert row.ids is not None
        assert {*row.ids.tolist()} == {*TOKENS[best].reshape(-1).tolist()}


def test_a_row_does_not_depend_on_others() -> None:
    head = split(linear(WEIGHT), 3)
    for number, together in enumerate(head.logits(ROWS)):
        (alone,) = head.logits(ROWS[number : number + 1])
        np.testing.assert_array_equal(alone.values, together.values)
        np.testing.assert_array_equal(alone.ids, together.ids)


def test_of_equal_scores_the_first_clusters_are_chosen() -> None:
    same = linear(np.ones((CLUSTERS, HIDDEN), np.float32))
    head = TwoStageHead.split(linear(WEIGHT), same, TOKENS, 2)
    for row in head.logits(ROWS):
        assert row.ids is not None
        assert {*row.ids.tolist()} == {*TOKENS[:2].reshape(-1).tolist()}


def test_a_row_reads_the_centroids_and_the_best_clusters() -> None:
    sizes = [each.out_features for each in split(linear(WEIGHT), 3).linears()]
    assert sizes == [CLUSTERS, SIZE, SIZE, SIZE]
