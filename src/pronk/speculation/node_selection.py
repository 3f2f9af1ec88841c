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

from pronk.speculation.cost_model import CostCurve, most_paying
from pronk.speculation.tree import TokenTree

__all__ = ["select_paying_nodes"]

# A guess: its gain with the sign changed, the number of its tree, its node there.
_Ranked = tuple[float, int, int]


def select_paying_nodes(
    trees: Sequence[TokenTree],
    requests: int,
    costs: CostCurve | None,
    *,
    prompts: int = 0,
    most: Sequence[int] | None = None,
) -> list[TokenTree]:
    """Cut the trees of a pass to the guesses that pay.

    Nodes without a gain and those that may not be accepted are left alone: a drafter has its own reasons for them.

    Args:
        trees: of requests that decode; not empty.
        requests: that decode, those without a tree included: one row and one token of each.
        costs: of passes; while they are not known nothing pays, so that the next pass is one to compare with.
        prompts: rows of prompts in the pass.
        most: guesses that each tree may keep at most.
    """
    ranked: list[_Ranked] = []
    dropped: dict[int, set[int]] = {}
    others = 0
    for number, tree in enumerate(trees):
        gain = tree.gain
        own = sorted((-gain[n], number, n) for n in range(1, len(tree)) if tree.acceptable[n]) if gain else []
        kept = own[: len(own) if most is None else most[number]]
        others += tree.num_draft_tokens - len(own)
        ranked += kept
        dropped[number] = {node for _, _, node in own[len(kept) :]}
    ranked.sort()
    count = 0 if costs is None else _paying(ranked, requests, others, costs, prompts)
    for _, number, node in ranked[count:]:
        dropped[number].add(node)
    return [
        tree.keep(node for node in range(len(tree)) if node not in dropped[number]) if dropped[number] else tree
        for number, tree in enumerate(trees)
    ]


def _paying(ranked: Sequence[_Ranked], requests: int, others: int, costs: CostCurve, prompts: int) -> int:
    """How many of the guesses, the likeliest first, are kept; ``others`` are there in any case."""
    rows, saved = prompts + requests + others, costs.at(prompts + requests) - costs.at(requests)
    gains = (-loss for loss, _, _ in ranked)
    return most_paying(gains, float(requests), lambda draft_tokens: costs.at(rows + draft_tokens) - saved)[0]
