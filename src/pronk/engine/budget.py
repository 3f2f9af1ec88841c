"""How much to guess: the nodes that pay for their rows.

With gains ``g``, the probabilities that the walk reaches each node, and the measured time ``t(n)`` of a pass over ``n``
rows, the nodes of largest gain are kept for which ::

    tokens expected of the pass       requests + Σ g
    ---------------------------  =  -------------------     is largest,
       time of the pass             t(requests + nodes)

over all requests of the pass together. Since a child's gain is at most its parent's, what is kept is a tree; and none
is kept, which is plain decoding, where no guess pays.

Where prompts are read in the same pass, those rows are work of their own, and what a token is worth is what it takes to
decode it: the time is that of a pass without prompts, and what the nodes add to the pass that there is::

    t(requests) + t(prompts + requests + nodes) - t(prompts + requests)

If the whole pass were the time, it would be so long already that any guess would seem cheap.
"""

from __future__ import annotations

from collections.abc import Sequence

from pronk.passes.costs import PassCosts
from pronk.tree import TokenTree

__all__ = ["keep_paying_nodes"]


def keep_paying_nodes(
    trees: Sequence[TokenTree], requests: int, costs: PassCosts, *, prompts: int = 0
) -> list[TokenTree]:
    """Cut the trees of a pass to the guesses that pay.

    Nodes without a gain and those that may not be accepted are left alone: a drafter has its own reasons for them.

    Args:
        trees: of requests that decode; not empty.
        requests: that decode, those without a tree included: one row and one token of each.
        costs: of passes.
        prompts: rows of prompts in the pass.
    """
    ranked: list[tuple[float, int, int]] = []
    for number, tree in enumerate(trees):
        if tree.gain is not None:
            ranked += [(-tree.gain[node], number, node) for node in range(1, len(tree)) if tree.acceptable[node]]
    ranked.sort()
    others = sum(tree.num_guesses for tree in trees) - len(ranked)
    rows, expected = prompts + requests + others, float(requests)
    saved = costs.at(prompts + requests) - costs.at(requests)
    best, count = expected / (costs.at(rows) - saved), 0
    for number, (loss, _, _) in enumerate(ranked, 1):
        expected -= loss
        value = expected / (costs.at(rows + number) - saved)
        if value > best:
            best, count = value, number
    dropped: dict[int, set[int]] = {}
    for _, number, node in ranked[count:]:
        dropped.setdefault(number, set()).add(node)
    return [
        tree.keep(node for node in range(len(tree)) if node not in dropped[number]) if number in dropped else tree
        for number, tree in enumerate(trees)
    ]
