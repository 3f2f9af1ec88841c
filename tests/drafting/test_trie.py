"""Tries of candidates: merging, order and limits."""

import random
from itertools import pairwise

import pytest

from pronk.drafting.trie import Trie
from pronk.sampling.tree import TokenTree

NO_ORIGIN = ("", 0)


def words(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(1, len(tree))}


def grow(candidates: list[list[int]], fall: float = 1.0) -> Trie:
    trie = Trie(9)
    for candidate in candidates:
        node = 0
        for token in candidate:
            node = trie.add(node, token, trie.gains[node] * fall, NO_ORIGIN)
    return trie


@pytest.mark.parametrize(
    ("candidates", "max_nodes", "tokens", "parents"),
    [
        ([], 9, (9,), (-1,)),
        ([[1, 2, 3], [1, 2, 3]], 9, (9, 1, 2, 3), (-1, 0, 1, 2)),
        ([[1, 2], [1, 2, 3]], 9, (9, 1, 2, 3), (-1, 0, 1, 2)),
        ([[1, 2, 3], [1, 4], [4, 2]], 9, (9, 1, 2, 3, 4, 4, 2), (-1, 0, 1, 2, 1, 0, 5)),
        ([[1, 1, 1], [1, 1, 2]], 9, (9, 1, 1, 1, 2), (-1, 0, 1, 2, 2)),
        ([[1, 2, 3], [4, 5]], 2, (9, 1, 2), (-1, 0, 1)),
        ([[1, 2, 3]], 0, (9,), (-1,)),
        ([[1, 2, 3]], -1, (9,), (-1,)),
    ],
)
def test_equal_gains_keep_their_order(
    candidates: list[list[int]], max_nodes: int, tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    tree = grow(candidates).tree(max_nodes)
    assert (tree.tokens, tree.parents) == (tokens, parents)


def test_a_trie_has_exactly_the_prefixes_of_its_candidates() -> None:
    dice = random.Random(1)
    for _ in range(200):
        candidates = [
            [dice.randrange(3) for _ in range(dice.randrange(6))] for _ in range(dice.randrange(5))
        ]
        prefixes = {tuple(c[:n]) for c in candidates for n in range(1, len(c) + 1)}
        trie = grow(candidates, 0.5)
        assert words(trie.tree(100)) == prefixes
        assert len(trie) == len(prefixes) + 1
        limit = dice.randrange(8)
        cut = trie.tree(limit)
        assert words(cut) <= prefixes
        assert cut.num_draft_tokens == min(limit, len(prefixes))


def test_the_likeliest_nodes_stay_and_the_greedy_path_comes_first() -> None:
    dice = random.Random(2)
    for _ in range(200):
        trie = Trie(0)
        for _ in range(dice.randrange(1, 30)):
            trie.add(
                dice.randrange(len(trie)),
                dice.randrange(4),
                dice.random(),
                ("one", dice.randrange(9)),
            )
        size = dice.randrange(1, 12)
        tree = trie.tree(size)
        assert tree.gain is not None
        assert sorted(tree.gain[1:], reverse=True) == sorted(trie.gains[1:], reverse=True)[:size]
        assert all(tree.gain[node] <= tree.gain[tree.parents[node]] for node in range(1, len(tree)))
        node = 0
        for expected, (_, child) in enumerate(pairwise(range(tree.main_chain)), 1):
            siblings = [other for other in range(1, len(tree)) if tree.parents[other] == node]
            assert child == expected
            assert tree.gain[child] == max(tree.gain[other] for other in siblings)
            node = child
        assert not [other for other in range(1, len(tree)) if tree.parents[other] == node]


def test_a_node_keeps_the_larger_gain_and_its_origin() -> None:
    trie = Trie(0)
    one = trie.add(0, 5, 0.3, ("a", 1))
    assert trie.add(0, 5, 0.6, ("b", 2)) == one
    assert trie.add(0, 5, 0.2, ("c", 3)) == one
    trie.add(one, 6, 0.9, ("d", 4))  # bounded by the parent's gain
    tree = trie.tree(9)
    assert tree.gain == (1.0, 0.6, 0.6)
    assert tree.origin == (("", 0), ("b", 2), ("d", 4))
    assert trie.child(0, 5) == one
    assert trie.child(0, 6) is None
    assert trie.adds_sibling(0, 6)
    assert not trie.adds_sibling(0, 5)
    assert not trie.adds_sibling(2, 7)


def test_merged_trees() -> None:
    dice = random.Random(3)
    for _ in range(50):
        trees = []
        for _ in range(3):
            grown = grow([[dice.randrange(3) for _ in range(4)] for _ in range(2)], 0.7)
            trees.append(grown.tree(dice.randrange(9)))
        trie = Trie(9)
        for tree in trees:
            trie.merge(tree)
        assert words(trie.tree(99)) == set().union(*(words(tree) for tree in trees))


def test_nodes_that_may_not_be_accepted_are_not_merged() -> None:
    tree = TokenTree((0, 1, 2, 3), (-1, 0, 1, 0), (True, False, True, True))
    trie = Trie(0)
    trie.merge(tree, ("other", 4))
    merged = trie.tree(9)
    assert (merged.tokens, merged.parents, merged.origin) == (
        (0, 3),
        (-1, 0),
        (("", 0), ("other", 4)),
    )


def test_children_of_several_trees_share_the_probability() -> None:
    """A new child is right only if no child from another tree is."""
    trie = Trie(9)
    trie.merge(TokenTree((9, 1, 5, 6), (-1, 0, 1, 1), gain=(1.0, 0.6, 0.5, 0.05)))
    trie.merge(TokenTree((9, 2, 7), (-1, 0, 1), gain=(1.0, 0.5, 0.25)))
    assert trie.gains == pytest.approx([1.0, 0.6, 0.5, 0.05, 0.4 * 0.5, 0.4 * 0.25])
    trie.merge(TokenTree((9, 1, 8), (-1, 0, 1), gain=(1.0, 0.3, 0.15)))
    assert trie.gains[6:] == pytest.approx([0.05 * 0.5])  # 0.55 of 0.6 are taken below token 1
    assert trie.gains[1] == 0.6


def test_siblings_of_one_tree_do_not_lower_each_other() -> None:
    tree = TokenTree((9, 1, 2, 3), (-1, 0, 0, 0), gain=(1.0, 0.6, 0.3, 0.1))
    trie = Trie(9)
    trie.merge(tree)
    assert trie.gains == pytest.approx([1.0, 0.6, 0.3, 0.1])
    trie.merge(TokenTree((9, 4), (-1, 0), gain=(1.0, 0.9)))
    assert trie.gains[4] == pytest.approx(0.0)


def test_a_common_child_keeps_the_larger_gain() -> None:
    trie = Trie(9)
    trie.merge(
        TokenTree((9, 1, 2), (-1, 0, 1), gain=(1.0, 0.5, 0.4), origin=(("", 0), ("a", 0), ("a", 1)))
    )
    trie.merge(
        TokenTree((9, 1, 2), (-1, 0, 1), gain=(1.0, 0.8, 0.4), origin=(("", 0), ("b", 0), ("b", 1)))
    )
    assert trie.gains == pytest.approx([1.0, 0.8, 0.4])
    assert trie.origins[1:] == [("b", 0), ("a", 1)]


def test_merged_gains_of_siblings_stay_within_their_parents() -> None:
    dice = random.Random(4)
    for _ in range(100):
        trie = Trie(9)
        for _ in range(3):
            grown = Trie(9)
            for _ in range(12):
                parent = dice.randrange(len(grown))
                gain = grown.gains[parent] * grown.probability_wrong(parent) * dice.random()
                grown.add(parent, dice.randrange(1000), gain, NO_ORIGIN)
            trie.merge(grown.tree(99))
        for node, gain in enumerate(trie.gains):
            children = [
                trie.gains[child] for child in range(1, len(trie)) if trie.parents[child] == node
            ]
            assert sum(children) <= gain + 1e-9
            assert trie.probability_wrong(node) == pytest.approx(
                1.0 - sum(children) / gain if gain else 0.0, abs=1e-9
            )


def test_a_tree_without_gains_halves_them_with_each_depth() -> None:
    trie = Trie(9)
    trie.merge(TokenTree.chain([9, 1, 2]), ("own", 3))
    assert trie.gains == [1.0, 0.5, 0.25]
    assert trie.origins[1:] == [("own", 3)] * 2


def test_probability_that_no_child_is_right() -> None:
    trie = Trie(9)
    assert trie.probability_wrong(0) == 1.0
    one = trie.add(0, 1, 0.5, NO_ORIGIN)
    trie.add(0, 2, 0.3, NO_ORIGIN)
    trie.add(one, 3, 0.4, NO_ORIGIN)
    assert trie.probability_wrong(0) == pytest.approx(0.2)
    assert trie.probability_wrong(one) == pytest.approx(0.2)
    trie.add(0, 4, 0.9, NO_ORIGIN)  # together above 1
    assert trie.probability_wrong(0) == 0.0
    zero = trie.add(0, 5, 0.0, NO_ORIGIN)
    assert trie.probability_wrong(zero) == 0.0
