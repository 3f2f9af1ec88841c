"""Partitions of trees: each node has one owner, ancestors are recomputed, and costs are
balanced.
"""

import random

import pytest

from pronk.parallel.tree_partition import ProcessShard, count_rows, partition_trees, preorder
from pronk.sampling.tree import TokenTree


def a_tree(dice: random.Random) -> TokenTree:
    size = dice.randint(1, 40)
    parents = [dice.randrange(node) if dice.random() < 0.5 else node - 1 for node in range(1, size)]
    return TokenTree(tuple(range(size)), (-1, *parents))


def linear(first: float, row: float) -> object:
    return lambda rows: first + row * (rows - 1)


def check(trees: list[TokenTree], shares: list[ProcessShard]) -> None:
    """Check that one process owns each node, and that each process computes a node after its
    parent.
    """
    owned = list[tuple[int, int]]()
    for share in shares:
        for piece in share:
            tree = trees[piece.entry]
            there = set[int]()
            for node in piece.nodes:
                assert node == 0 or tree.parents[node] in there
                there.add(node)
            assert len(there) == len(piece.nodes)
            owned += [(piece.entry, node) for node in piece.own_nodes]
    assert sorted(owned) == [
        (entry, node) for entry, tree in enumerate(trees) for node in range(len(tree))
    ]


def test_every_node_is_computed_with_all_above_it() -> None:
    num_split = 0
    for seed in range(300):
        dice = random.Random(seed)
        trees = [a_tree(dice) for _ in range(dice.randint(1, 4))]
        workers = dice.randint(1, 4)
        costs = [linear(1.0, dice.choice((0.01, 0.1, 1.0))) for _ in range(workers)]
        shares = partition_trees(trees, costs, [0.0] + [0.05] * (workers - 1))  # type: ignore[arg-type]
        assert len(shares) == workers
        check(trees, shares)
        num_split += sum(bool(share) for share in shares) > 1
    assert num_split > 100


def test_branches_are_split_evenly_and_ancestors_recomputed() -> None:
    """The example in the docstring of ``tree_partition``."""
    tree = TokenTree(tuple(range(7)), (-1, 0, 1, 2, 0, 4, 4))
    first, second = partition_trees([tree], [linear(0.1, 1.0)] * 2)  # type: ignore[list-item]
    assert [piece.nodes for piece in first] == [(0, 1, 2, 3)]
    assert [(piece.nodes, piece.own_nodes) for piece in second] == [((0, 4, 5, 6), (4, 5, 6))]


def test_the_driver_always_computes_a_row() -> None:
    """Without a row, the costs of the driver's forward passes would not be measured any more."""
    trees = [TokenTree(tuple(range(9)), (-1, *[0] * 8)), TokenTree((1, 2), (-1, 0))]
    for others in (1, 2):
        shares = partition_trees(trees, [linear(1e9, 1e9), *[linear(1.0, 0.1)] * others])  # type: ignore[list-item]
        check(trees, shares)
        assert count_rows(shares[0]) == 1


def test_a_slow_worker_gets_fewer_rows_and_an_expensive_one_none() -> None:
    trees = [TokenTree(tuple(range(41)), (-1, *[0] * 40))]
    fast, slow = partition_trees(trees, [linear(0.1, 1.0), linear(0.1, 3.0)])  # type: ignore[list-item]
    assert 2.5 < count_rows(fast) / count_rows(slow) < 3.5
    whole, none = partition_trees(trees, [linear(0.1, 1.0)] * 2, [0.0, 100.0])  # type: ignore[list-item]
    assert count_rows(whole) == 41
    assert not none


def test_a_chain_is_not_split() -> None:
    """The end of a chain requires all nodes above it."""
    shares = partition_trees([TokenTree.chain(range(30))], [linear(0.1, 1.0)] * 3)  # type: ignore[list-item]
    assert [count_rows(share) for share in shares] == [30, 0, 0]


def test_chains_of_several_requests_are_distributed() -> None:
    trees = [TokenTree.chain(range(30)) for _ in range(4)]
    shares = partition_trees(trees, [linear(0.1, 1.0)] * 2)  # type: ignore[list-item]
    assert [count_rows(share) for share in shares] == [60, 60]


@pytest.mark.parametrize("unknown", [float("inf"), 1.0])
def test_unknown_and_constant_costs(unknown: float) -> None:
    """The driver computes all rows if the cost of more than 2 rows is unknown (inf) or constant."""
    trees = [TokenTree(tuple(range(9)), (-1, *[0] * 8))]
    shares = partition_trees(trees, [lambda rows: unknown if rows > 2 else 0.5] * 2, [0.0, 1.0])
    assert [count_rows(share) for share in shares] == [9, 0]


def test_preorder() -> None:
    tree = TokenTree(tuple(range(6)), (-1, 0, 0, 1, 2, 1))
    assert preorder(tree) == [0, 1, 3, 5, 2, 4]
