"""How much to guess: the nodes that pay for their rows.

With gains ``g``, the probabilities that the walk reaches each node, and the measured time ``t(n)`` of a pass over ``n``
rows, the nodes of largest gain are kept for which ::

    tokens expected of the pass      requests + Σ g
    ---------------------------  =  -----------------     is largest,
       time of the pass              t(rows + nodes)

over all requests of the pass together. Since a child's gain is at most its parent's, what is kept is a tree; and none
is kept, which is plain decoding, where no guess pays.
"""

from __future__ import annotations

from collections.abc import Sequence

from pronk.passes.costs import PassCosts
from pronk.tree import TokenTree

__all__ = ["keep_paying_nodes"]


def keep_paying_nodes(trees: Sequence[TokenTree], rows: int, costs: PassCosts) -> list[TokenTree]:
    """Cut the trees of a pass to the guesses that pay.

    Nodes without a gain and those that may not be accepted are left alone: a drafter has its own reasons for them.

    Args:
        trees: one per request that decodes; not empty.
        rows: of the pass without these trees' guesses, their roots included.
        costs: of passes.
    """
    ranked: list[tuple[float, int, int]] = []
    for number, tree in enumerate(trees):
        if tree.gain is not None:
            ranked += [(-tree.gain[node], number, node) for node in range(1, len(tree)) if tree.acceptable[node]]
    ranked.sort()
    rows += sum(tree.num_guesses for tree in trees) - len(ranked)
    expected = float(len(trees))
    best, count = expected / costs.at(rows), 0
    for number, (loss, _, _) in enumerate(ranked, 1):
        expected -= loss
        value = expected / costs.at(rows + number)
        if value > best:
            best, count = value, number
    dropped: dict[int, set[int]] = {}
    for _, number, node in ranked[count:]:
        dropped.setdefault(number, set()).add(node)
    return [
        tree.keep(node for node in range(len(tree)) if node not in dropped[number]) if number in dropped else tree
        for number, tree in enumerate(trees)
    ]
