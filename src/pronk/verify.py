"""Verification: a pure walk down the tree along the target's own choices.

Vocabulary: a *drafted* token is a guess in the tree; it is *accepted* if the target chooses it in its place; the
*bonus* token is the target's choice after the last accepted one, which the pass gives for free. The walk's output is
the accepted tokens and the bonus token, so a step yields at least one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pronk.tree import TokenTree

__all__ = ["Walk", "walk"]


@dataclass(frozen=True)
class Walk:
    """Where the target's choices led.

    Attributes:
        path: accepted nodes, from the first below the start of the walk on.
        tokens: the target's choices in order: the tokens of ``path`` and then the bonus token.
        certain: how many of ``tokens`` were chosen at nodes of the main chain, from logits that are those of plain
            decoding. The rest is provisional where row order matters to the last bit (see
            :mod:`pronk.engine.engine`).
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    certain: int


def walk(tree: TokenTree, choose: Callable[[int, int], int], start: int = 0) -> Walk:
    """Follow the target from ``start`` for as long as the tree contains its choices.

    Args:
        tree: the guesses.
        choose: ``choose(node, depth)`` is the target's token after ``node``, given the tokens it chose before in this
            walk; ``depth`` counts those.
        start: the node of the last certain token; the nodes before it are its ancestors on the main chain.
    """
    node, path, tokens = start, list[int](), list[int]()
    certain = 0
    while True:
        token = choose(node, len(tokens))
        tokens.append(token)
        certain += node < tree.main_chain
        child = tree.child(node, token)
        if child is None:
            return Walk(tuple(path), tuple(tokens), certain)
        path.append(child)
        node = child
