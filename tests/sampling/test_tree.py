"""Token trees: visibility cell by cell, parts of trees, and invalid trees."""

import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from pronk.sampling.tree import TokenTree, TokenView

# the example in the docstring of speculation.tree
CAT = TokenTree((10, 11, 12, 13, 14), (-1, 0, 1, 0, 3))


def grid(tree: TokenTree) -> list[str]:
    return ["".join("x" if cell else "." for cell in row) for row in tree.visible]


def random_tree(dice: random.Random, size: int, vocab: int = 1000) -> TokenTree:
    """Return a tree of any shape; no token occurs twice, so that siblings differ."""
    parents = (-1, *(dice.randrange(node) for node in range(1, size)))
    verify = tuple(dice.random() < 0.8 for _ in range(size)) if dice.random() < 0.5 else None
    gain = tuple(dice.random() for _ in range(size)) if dice.random() < 0.5 else None
    drawn = [
        np.array([dice.random() for _ in range(3)]) if dice.random() < 0.7 else None
        for _ in range(size)
    ]
    probs = tuple(drawn) if dice.random() < 0.5 else None
    return TokenTree(tuple(dice.sample(range(vocab), size)), parents, verify, probs, gain)


@pytest.mark.parametrize(
    ("parents", "visible", "depths", "main_chain"),
    [
        ((-1,), ["x"], (0,), 1),
        ((-1, 0, 1), ["x..", "xx.", "xxx"], (0, 1, 2), 3),
        ((-1, 0, 1, 0, 3), ["x....", "xx...", "xxx..", "x..x.", "x..xx"], (0, 1, 2, 1, 2), 3),
        ((-1, 0, 0, 0), ["x...", "xx..", "x.x.", "x..x"], (0, 1, 1, 1), 2),
        ((-1, 0, 0, 1, 2), ["x....", "xx...", "x.x..", "xx.x.", "x.x.x"], (0, 1, 1, 2, 2), 2),
        # Lookahead's window: a main chain, and a chain of 2 below each of three of its nodes.
        (
            (-1, 0, 1, 2, 1, 2, 3, 4, 5, 6),
            [
                "x.........",
                "xx........",
                "xxx.......",
                "xxxx......",
                "xx..x.....",
                "xxx..x....",
                "xxxx..x...",
                "xx..x..x..",
                "xxx..x..x.",
                "xxxx..x..x",
            ],
            (0, 1, 2, 3, 2, 3, 4, 3, 4, 5),
            4,
        ),
    ],
)
def test_visible_nodes(
    parents: tuple[int, ...], visible: list[str], depths: tuple[int, ...], main_chain: int
) -> None:
    tree = TokenTree(tuple(range(len(parents))), parents)
    assert grid(tree) == visible
    assert tree.depths == depths
    assert tree.main_chain == main_chain
    assert tree.num_draft_tokens == len(tree) - 1 == len(parents) - 1


def test_a_node_sees_its_ancestors_and_itself() -> None:
    dice = random.Random(0)
    for _ in range(200):
        tree = random_tree(dice, dice.randint(1, 25))
        for node in range(len(tree)):
            path = tree.path(node)
            assert set(np.flatnonzero(tree.visible[node])) == {0, *path}
            assert len(path) == tree.depths[node] == tree.visible[node].sum() - 1
            assert list(path) == sorted(path)
            assert not path or path[-1] == node
            assert [tree.parents[child] for child in path] == [0, *path][:-1]
        straight = [tree.path(node) == tuple(range(1, node + 1)) for node in range(len(tree))]
        assert tree.main_chain == [*straight, False].index(False)


def test_chain() -> None:
    tree = TokenTree.chain(iter([7, 8, 9]), gain=[1.0, 0.5, 0.2])
    assert (tree.tokens, tree.parents, tree.gain) == ((7, 8, 9), (-1, 0, 1), (1.0, 0.5, 0.2))
    assert TokenTree.chain([7]).num_draft_tokens == 0
    q = np.ones(3)
    assert TokenTree.chain([7, 8, 9], probs=iter([None, q, None])).probs == (None, q, None)
    assert tree.main_chain == 3


def test_child() -> None:
    tree = TokenTree((0, 5, 6, 5, 7, 7), (-1, 0, 0, 1, 2, 2), (True, True, False, True, True, True))
    assert tree.child(0, 5) == 1
    assert tree.child(0, 6) is None  # may not be accepted
    # below a node that may not be accepted, equal siblings are allowed
    assert tree.child(2, 7) is None
    assert tree.child(1, 5) == 3
    assert tree.child(0, 7) is None
    assert tree.child(3, 5) is None


def test_draft_samples() -> None:
    q = np.full(8, 0.125)
    r = np.eye(8)[0]
    tree = TokenTree(
        (0, 5, 6, 5, 7, 1),
        (-1, 0, 0, 1, 0, 4),
        (True, False, True, True, True, True),
        (None, q, r) * 2,
    )
    assert tree.draft_samples(0) == ((6, r), (7, q))
    assert tree.draft_samples(1) == ()  # below a node that may not be accepted
    assert tree.draft_samples(4) == ((1, r),)
    assert tree.keep([2, 4, 5]).draft_samples(0) == ((6, r), (7, q))
    assert CAT.draft_samples(0) == ((11, None), (13, None))
    assert (CAT.draft_sample(0), tree.draft_sample(1)) == ((10, None), (5, q))


def test_first_chain() -> None:
    assert CAT.first_chain(0) == (1, 2)
    assert CAT.first_chain(3) == (4,)
    assert CAT.first_chain(4) == ()
    tree = TokenTree((0, 5, 6, 5, 7, 1), (-1, 0, 0, 1, 0, 2), (True, False, True, True, True, True))
    assert tree.first_chain(0) == (2, 5)
    assert tree.first_chain(1) == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), ()), "one parent per token"),
        (((1, 2), (-1,)), "one parent per token"),
        (((1, 2), (0, 0)), "the first -1"),
        (((1, 2), (-1, -1)), "found node 1 with parent -1"),
        (((1, 2), (-1, 1)), "found node 1 with parent 1"),
        (((1, 2, 3), (-1, 2, 0)), "found node 1 with parent 2"),
        (((1, 2, 3), (-1, 0, -2)), "found node 2 with parent -2"),
        (((1, 2, 2), (-1, 0, 0)), "found token 2 twice below node 0"),
        (((1, 2), (-1, 0), (True,)), "2 entries in verify, found 1"),
        (((1, 2), (-1, 0), None, (None,) * 3), "2 entries in probs, found 3"),
        (((1, 2), (-1, 0), None, None, (1.0,)), "2 entries in gain, found 1"),
    ],
)
def test_invalid_trees_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(*arguments).check()  # type: ignore[arg-type]


def test_acceptable_nodes() -> None:
    """A node is acceptable if all nodes of its path may be accepted."""
    parents = (-1, 0, 1, 2, 0, 4)
    tree = TokenTree((0, 1, 2, 3, 4, 5), parents, (False, True, False, True, True, True))
    assert CAT.acceptable == (True,) * 5
    assert tree.acceptable[1:] == (True, False, False, True, True)
    assert tree.child(2, 3) is None


def test_equal_siblings_that_may_not_be_accepted() -> None:
    tree = TokenTree((1, 2, 2, 2), (-1, 0, 0, 0), (True, False, True, False))
    assert tree.child(0, 2) == 2


def entries(tree: TokenTree, node: int) -> tuple[object, ...]:
    """Return a node's token, ``verify``, ``gain`` and the identity of its distribution."""
    return (
        tree.tokens[node],
        None if tree.verify is None else tree.verify[node],
        None if tree.gain is None else tree.gain[node],
        None if tree.probs is None else id(tree.probs[node]),
    )


def assert_subtree(part: TokenTree, tree: TokenTree, nodes: Sequence[int]) -> None:
    """Check that ``part`` consists of the given nodes of ``tree``, with equal values and paths."""
    assert len(part) == len(nodes)
    for new, old in enumerate(nodes):
        assert entries(part, new) == entries(tree, old)
        assert tuple(nodes[i] for i in part.path(new)) == tree.path(old)


def test_keep() -> None:
    assert_subtree(CAT.keep([1, 3, 4]), CAT, [0, 1, 3, 4])
    assert_subtree(CAT.keep([2, 4]), CAT, [0])  # their parents are dropped
    assert_subtree(CAT.keep([4, 3]), CAT, [0, 3, 4])
    assert_subtree(CAT.keep([]), CAT, [0])
    dice = random.Random(2)
    for _ in range(200):
        tree = random_tree(dice, dice.randint(1, 20))
        wanted = {node for node in range(len(tree)) if dice.random() < 0.7} | {0}
        whole = [node for node in range(len(tree)) if {0, *tree.path(node)} <= wanted]
        assert_subtree(tree.keep(wanted), tree, whole)


def test_limit() -> None:
    assert CAT.limit(2, 4) is CAT
    assert_subtree(CAT.limit(1, 9), CAT, [0, 1, 3])
    assert_subtree(CAT.limit(9, 3), CAT, [0, 1, 2, 3])
    assert_subtree(CAT.limit(1, 1), CAT, [0, 1])
    assert_subtree(CAT.limit(0, 9), CAT, [0])
    assert_subtree(CAT.limit(9, 0), CAT, [0])
    dice = random.Random(3)
    for _ in range(200):
        tree = random_tree(dice, dice.randint(1, 20))
        depth = dice.randrange(6)
        nodes = dice.randrange(12)
        fitting = [node for node in range(len(tree)) if tree.depths[node] <= depth]
        assert_subtree(tree.limit(depth, nodes), tree, fitting[: nodes + 1])


def test_hang_below() -> None:
    assert CAT.hang_below([]) is CAT
    tree = CAT.hang_below([1, 2])
    assert tree.tokens == (1, 2, 10, 11, 12, 13, 14)
    assert tree.parents == (-1, 0, 1, 2, 3, 2, 5)
    assert tree.main_chain == 5
    dice = random.Random(4)
    for _ in range(200):
        below = random_tree(dice, dice.randint(1, 12))
        above = dice.randint(1, 5)
        tree = below.hang_below(range(above))
        assert tree.tokens == (*range(above), *below.tokens)
        assert tree.main_chain == below.main_chain + above
        assert tree.depths == (*range(above), *(depth + above for depth in below.depths))
        for node in range(1, len(below)):
            token = below.tokens[node]
            found = tree.child(below.parents[node] + above, token)
            old = below.child(below.parents[node], token)
            assert found == (None if old is None else old + above)
        for node in range(len(below)):
            assert tree.draft_sample(node + above) == below.draft_sample(node)
        assert all(tree.draft_sample(node) == (node, None) for node in range(above))
        # The tokens above and the old root may be accepted.
        assert all(tree.child(node, tree.tokens[node + 1]) == node + 1 for node in range(above))


@pytest.mark.parametrize("split", range(6))
def test_a_view_behaves_like_a_list(split: int) -> None:
    tokens = [7, 8, 9, 7, 5]
    longer = TokenView(tokens[:split], tuple(tokens[split:]))
    assert len(longer) == len(tokens)
    assert [*longer] == tokens
    assert [*reversed(longer)] == tokens[::-1]
    places = [*range(-8, 9)]
    for place in places:
        if -5 <= place < 5:
            assert longer[place] == tokens[place]
        else:
            with pytest.raises(IndexError):
                longer[place]
    for start, stop, step in product([None, *places], [None, *places], [None, 1, 2, -1, -3]):
        assert longer[start:stop:step] == tokens[start:stop:step]
    assert (longer.index(7), longer.count(7), 5 in longer, 6 in longer) == (0, 2, True, False)
