"""Who computes which nodes: every node once, with all that is above it, and nobody longer than need be."""

import random

import pytest

from pronk.parallel.tree_partition import WorkerShare, partition_trees, preorder
from pronk.speculation.tree import TokenTree


def a_tree(dice: random.Random) -> TokenTree:
    size = dice.randint(1, 40)
    parents = [dice.randrange(node) if dice.random() < 0.5 else node - 1 for node in range(1, size)]
    return TokenTree(tuple(range(size)), (-1, *parents))


def linear(first: float, row: float) -> object:
    return lambda rows: first + row * (rows - 1)


def check(trees: list[TokenTree], shares: list[WorkerShare]) -> None:
    """Every node is one worker's own, and below its parent wherever it is."""
    owned = list[tuple[int, int]]()
    for share in shares:
        for piece in share.pieces:
            tree, there = trees[piece.job], set[int]()
            for node in piece.nodes:
                assert node == 0 or tree.parents[node] in there
                there.add(node)
            assert len(there) == len(piece.nodes)
            owned += [(piece.job, node) for node in piece.own]
    assert sorted(owned) == [(job, node) for job, tree in enumerate(trees) for node in range(len(tree))]


def test_every_node_is_computed_with_all_above_it() -> None:
    dealt = 0
    for seed in range(300):
        dice = random.Random(seed)
        trees = [a_tree(dice) for _ in range(dice.randint(1, 4))]
        workers = dice.randint(1, 4)
        costs = [linear(1.0, dice.choice((0.01, 0.1, 1.0))) for _ in range(workers)]
        shares = partition_trees(trees, costs, [0.0] + [0.05] * (workers - 1))  # type: ignore[arg-type]
        assert len(shares) == workers
        check(trees, shares)
        dealt += sum(bool(share.pieces) for share in shares) > 1
    assert dealt > 100


def test_branches_are_shared_evenly_and_what_is_above_is_repeated() -> None:
    """The example of the module."""
    tree = TokenTree(tuple(range(7)), (-1, 0, 1, 2, 0, 4, 4))
    first, second = partition_trees([tree], [linear(0.1, 1.0)] * 2)  # type: ignore[list-item]
    assert [piece.nodes for piece in first.pieces] == [(0, 1, 2, 3)]
    assert [(piece.nodes, piece.own) for piece in second.pieces] == [((0, 4, 5, 6), (4, 5, 6))]


def test_this_process_always_has_a_part() -> None:
    """However slow it is: what its passes cost would not be known any more."""
    trees = [TokenTree(tuple(range(9)), (-1, *[0] * 8)), TokenTree((1, 2), (-1, 0))]
    for others in (1, 2):
        shares = partition_trees(trees, [linear(1e9, 1e9), *[linear(1.0, 0.1)] * others])  # type: ignore[list-item]
        check(trees, shares)
        assert shares[0].rows == 1


def test_the_slower_gets_less_and_the_dear_nothing() -> None:
    trees = [TokenTree(tuple(range(41)), (-1, *[0] * 40))]
    fast, slow = partition_trees(trees, [linear(0.1, 1.0), linear(0.1, 3.0)])  # type: ignore[list-item]
    assert 2.5 < fast.rows / slow.rows < 3.5
    whole, none = partition_trees(trees, [linear(0.1, 1.0)] * 2, [0.0, 100.0])  # type: ignore[list-item]
    assert whole.rows == 41
    assert not none.pieces


def test_a_chain_is_nobody_elses() -> None:
    """To compute its end takes all that is above."""
    shares = partition_trees([TokenTree.chain(range(30))], [linear(0.1, 1.0)] * 3)  # type: ignore[list-item]
    assert [share.rows for share in shares] == [30, 0, 0]


def test_requests_are_dealt_too() -> None:
    trees = [TokenTree.chain(range(30)) for _ in range(4)]
    shares = partition_trees(trees, [linear(0.1, 1.0)] * 2)  # type: ignore[list-item]
    assert [share.rows for share in shares] == [60, 60]


@pytest.mark.parametrize("unknown", [float("inf"), 1.0])
def test_costs_that_nobody_knows(unknown: float) -> None:
    """Where passes of so many rows have no price yet, all is done here; where all cost the same, too."""
    trees = [TokenTree(tuple(range(9)), (-1, *[0] * 8))]
    shares = partition_trees(trees, [lambda rows: unknown if rows > 2 else 0.5] * 2, [0.0, 1.0])
    assert [share.rows for share in shares] == [9, 0]


def test_preorder() -> None:
    tree = TokenTree(tuple(range(6)), (-1, 0, 0, 1, 2, 1))
    assert preorder(tree) == [0, 1, 3, 5, 2, 4]
