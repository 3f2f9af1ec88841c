"""Trees of ranks against all possible trees."""

import random
from itertools import combinations, product
from math import prod
from typing import Any

import pytest

from pronk.base.errors import OptionError
from pronk.lab.drafters.rank_tree import Path, best_paths, check_paths, main_chain_first


def closed(paths: tuple[Path, ...]) -> bool:
    return all(path[:-1] in {(), *paths} for path in paths)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_no_tree_of_the_size_has_a_larger_expected_length(size: int) -> None:
    for seed in range(6):
        dice = random.Random(seed)
        accuracies = [sorted((dice.random() for _ in range(2)), reverse=True) for _ in range(3)]
        every = [path for depth in (1, 2, 3) for path in product(range(2), repeat=depth)]
        expected = {
            paths: sum(
                prod(accuracies[depth][rank] for depth, rank in enumerate(path)) for path in paths
            )
            for paths in combinations(every, size)
            if closed(paths)
        }
        best = best_paths(accuracies, size)
        assert len(best) == len(set(best)) == size
        assert closed(best)
        assert expected[tuple(sorted(best, key=every.index))] == pytest.approx(
            max(expected.values())
        )


def test_likely_paths_come_first_and_parents_before_children() -> None:
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.1]]
    want = ((0,), (0, 0), (1,), (0, 1), (1, 0), (2,))
    assert best_paths(accuracies, 6) == want
    assert best_paths(accuracies, 3) == want[:3]
    assert len(best_paths(accuracies, 99)) == 3 + 9


def test_a_rank_follows_the_better_ranks() -> None:
    assert best_paths([[0.1, 0.5], [0.0, 0.2]], 3) == ((0,), (1,), (0, 0))


def test_the_main_chain_comes_first() -> None:
    tree = ((1,), (0,), (2,), (1, 0), (0, 1), (0, 0), (0, 1, 0))
    assert main_chain_first(tree) == ((0,), (0, 0), (1,), (2,), (1, 0), (0, 1), (0, 1, 0))
    assert main_chain_first(((2,), (2, 3))) == ((2,), (2, 3))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), r"tree: expected 1\.\.1023 paths"),
        (7.5, "found 7.5"),
        ("0 1", "found '0 1'"),
        (tuple((rank,) for rank in range(64)) * 17, r"expected 1\.\.1023 paths"),
        ((0, 1), r"paths of 1\.\.2 ranks in 0\.\.63, found 0"),
        (((0,), ()), r"found \(\)"),
        (((0,), (True,)), r"found \(True,\)"),
        (((0,), (-1,)), r"found \(-1,\)"),
        (((64,),), r"ranks in 0\.\.63, found \(64,\)"),
        (((0,), (0, 0), (0, 0, 0)), r"1\.\.2 ranks in 0\.\.63, found \(0, 0, 0\)"),
        (((0,), (0,)), r"found \(0,\) twice"),
        (((0, 1), (0,)), r"found \(0, 1\) without \(0,\) before it"),
    ],
)
def test_invalid_trees_are_refused(paths: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        check_paths("medusa", paths, 2)
    assert "\n" not in str(caught.value)


def test_lists_become_tuples() -> None:
    assert check_paths("medusa", [[0], [0, 3]], 2) == ((0,), (0, 3))
