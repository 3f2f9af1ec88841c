"""``verify_tree`` against a plain recursion, on every tree of up to five nodes over two tokens."""

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import pytest

from exact_distributions import shapes
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import verify_tree


def trees(size: int) -> Iterator[TokenTree]:
    """Yield every tree over two tokens with every choice of acceptable nodes."""
    for parents in shapes(size, siblings=size):
        for tokens in product((0, 1), repeat=size - 1):
            for verify in product((True, False), repeat=size - 1):
                tree = TokenTree((0, *tokens), parents, (True, *verify))
                with suppress(ValueError):  # two acceptable siblings may not have the same token
                    tree.check()
                    yield tree


def children(tree: TokenTree, node: int) -> list[int]:
    """Return the acceptable children of a node."""
    return [
        i
        for i in range(len(tree))
        if tree.parents[i] == node and (tree.verify is None or tree.verify[i])
    ]


def recurse(tree: TokenTree, choices: tuple[int, ...], node: int) -> tuple[list[int], list[int]]:
    """Return the accepted nodes and the emitted tokens below a node."""
    token = choices[node]
    for child in children(tree, node):
        if tree.tokens[child] == token:
            path, tokens = recurse(tree, choices, child)
            return [child, *path], [token, *tokens]
    return [], [token]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_small_tree(size: int) -> None:
    dice = random.Random(size)
    seen = 0
    for tree in trees(size):
        every = list(product((0, 1, 2), repeat=size))
        for choices in every if size < 4 else dice.sample(every, 6):
            asked: list[int] = []

            def choose(node: int, choices: tuple[int, ...] = choices, asked: list = asked) -> int:
                asked.append(node)
                return choices[node]

            found = verify_tree(tree, choose)
            path, tokens = recurse(tree, choices, 0)
            assert (list(found.path), list(found.tokens)) == (path, tokens)
            # The target chooses once at each visited node, in order.
            assert asked == [0, *path]
            seen += len(path)
    assert seen > 0 or size == 1
