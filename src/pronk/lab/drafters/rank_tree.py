"""Choice of the draft tree for several heads, each of which predicts one of the next tokens.

Head ``d`` (1 is the first) predicts the token of depth ``d`` without seeing the draft tokens above
it. A node is therefore a *path of ranks*: ``(0, 2)`` is head 2's third likeliest token below head
1's likeliest token::

    root ┬ (0,) ┬ (0, 0) ─ (0, 0, 0)
         │      └ (0, 1)
         └ (1,) ─ (1, 0)

Let ``a[d][r]`` be the frequency with which head ``d``'s token of rank ``r`` is the target's token.
If the heads are independent, node ``(r1, r2, …)`` is accepted with the probability ``a[1][r1]
a[2][r2] …``, and a tree's expected number of accepted tokens is the sum of its nodes'
probabilities. The best tree of a given size is built greedily: add the likeliest node whose parent
is in the tree (Cai et al. 2024, 2.3.3).

A head's tokens are ranked once, for all nodes of its depth. Penalties therefore assume that the
likeliest token of each earlier head was generated, even for nodes below other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from pronk import OptionError, TokenTree
from pronk.base.arrays import Array
from pronk.base.checks import check_integer
from pronk.drafting import MAX_TREE, DraftContext, DrafterRates, Frontier, Trie

# Maximum number of draft tokens of a tree, which has a root besides them.
MAX_TREE_NODES = MAX_TREE - 1
MAX_RANKS = 64  # number of different ranks, 0..63, that the option ``tree`` may contain

# Number of likeliest tokens per head among which the best tree of a given number of nodes is
# searched.
_MAX_RANKS = 8

# Ranks of a node's ancestors from depth 1 on, then its own rank; rank 0 is the head's likeliest
# token.
Path = tuple[int, ...]


def best_paths(accuracies: Sequence[Sequence[float]], size: int) -> tuple[Path, ...]:
    """Return the ``size`` likeliest paths, the likeliest first; fewer if there are no more.

    Args:
        accuracies: ``a[d][r]`` of the module docstring, in 0..1. Each entry is replaced by the
            minimum of ``a[d][0]`` to ``a[d][r]``, so that a node is never chosen before its
            siblings of lower rank.
        size: number of nodes below the root.
    """
    monotone = [[min(row[: rank + 1]) for rank in range(len(row))] for row in accuracies]
    frontier = Frontier[Path]()
    paths = list[Path]()

    def push(parent_probability: float, path: Path) -> None:
        if len(path) <= len(monotone) and path[-1] < len(monotone[len(path) - 1]):
            frontier.push(parent_probability * monotone[len(path) - 1][path[-1]], path)

    push(1.0, (0,))
    while frontier and len(paths) < size:
        probability, path = frontier.pop()
        paths.append(path)
        push(probability, (*path, 0))
        parent_probability = prod(row[rank] for row, rank in zip(monotone, path[:-1], strict=False))
        push(parent_probability, (*path[:-1], path[-1] + 1))
    return tuple(paths)


def check_paths(drafter: str, paths: object, depth: int) -> tuple[Path, ...]:
    """Return the paths of a user's option as tuples.

    Raises OptionError unless each path has 1..``depth`` ranks and comes after its parent.
    """
    if not isinstance(paths, tuple | list) or not 1 <= len(paths) <= MAX_TREE_NODES:
        expected = f"1..{MAX_TREE_NODES} paths of ranks, as in ((0,), (1,), (0, 0))"
        msg = f"{drafter}: tree: expected {expected}, found {paths!r}"
        raise OptionError(msg)
    checked = list[Path]()
    for path in paths:
        has_ranks = isinstance(path, tuple | list) and all(
            type(rank) is int and 0 <= rank < MAX_RANKS for rank in path
        )
        if not has_ranks or not 1 <= len(path) <= depth:
            msg = (
                f"{drafter}: tree: expected paths of 1..{depth} ranks in 0..{MAX_RANKS - 1}, "
                f"found {path!r}"
            )
            raise OptionError(msg)
        ranks = tuple(path)
        if ranks in checked or (len(ranks) > 1 and ranks[:-1] not in checked):
            defect = "twice" if ranks in checked else f"without {ranks[:-1]} before it"
            msg = (
                f"{drafter}: tree: expected each path once and after its parent, "
                f"found {ranks} {defect}"
            )
            raise OptionError(msg)
        checked.append(ranks)
    return tuple(checked)


def check_tree(drafter: str, tree: object, depth: int) -> int | tuple[Path, ...] | None:
    """Return the option ``tree``: ``None``, a number of nodes, or paths, the main chain first.

    Raises OptionError if the value is invalid.
    """
    if isinstance(tree, int):
        check_integer(f"{drafter}: tree", tree, 1, MAX_TREE_NODES)
    if tree is None or isinstance(tree, int):
        return tree
    return main_chain_first(check_paths(drafter, tree, depth))


def main_chain_first(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Move the chain of likeliest children to the front; the other paths keep their order.

    If the main chain is accepted, its keys and values are already in consecutive KV slots and need
    not be moved.
    """
    chain = list[Path]()
    while children := [path for path in paths if path[:-1] == (chain[-1] if chain else ())]:
        chain.append(min(children))
    return (*chain, *(path for path in paths if path not in chain))


def draft_tree(
    context: DraftContext[Any], logits: Array, sources: Sequence[str], shape: int | Sequence[Path]
) -> TokenTree:
    """Return the tree for one request, within the request's limits of depth and nodes.

    Args:
        context: the request.
        logits: ``[heads, vocab]`` float32; the first head predicts the token after the request's
            last token.
        sources: for each head, its name in the acceptance statistics.
        shape: paths of ranks, the main chain first. With a number of nodes instead, the paths are
            chosen by this step's calibrated probabilities, from the ``_MAX_RANKS`` likeliest tokens
            of each head.
    """
    max_depth = min(context.max_depth, len(logits))
    all_rates = [context.acceptance.rates(label) for label in sources]
    if isinstance(shape, int):
        size = min(shape, context.max_nodes)
        ranked = _rank_tokens(context, logits, [min(_MAX_RANKS, size)] * max_depth)
        rates: list[list[float]] = []
        for depth, (own, tokens) in enumerate(zip(all_rates, ranked, strict=False), 1):
            kinds = [own.confidence_kind(prob) for _, prob in tokens]
            rates.append([own.rate(kind, depth) for kind in kinds])
        paths: Sequence[Path] = main_chain_first(best_paths(rates, size))
    else:
        paths = [path for path in shape if len(path) <= max_depth][: context.max_nodes]
        longest = max(map(len, paths), default=0)
        # Number of ranks that the paths use, by depth.
        counts = [1 + max(path[i] for path in paths if len(path) > i) for i in range(longest)]
        ranked = _rank_tokens(context, logits, counts)
    return _build_tree(context.tokens[-1], ranked, all_rates, paths)


def _rank_tokens(
    context: DraftContext[Any], logits: Array, counts: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """Return the ``counts[i]`` likeliest tokens of each head ``i``, the likeliest first.

    A token is a pair (id, probability). Later heads are left out if the sampler has no token for
    one.
    """
    sampler = context.sampler
    ranked = list[list[tuple[int, float]]]()
    with sampler.after():
        for row, count in zip(logits, counts, strict=False):
            draft_token = sampler.draft_token(row, context.root, draw=False)
            if draft_token is None:
                break
            ranked.append(draft_token.top_tokens(count))
            sampler.advance(draft_token.token)
    return ranked


def _build_tree(
    root: int,
    ranked: Sequence[Sequence[tuple[int, float]]],
    all_rates: Sequence[DrafterRates],
    paths: Sequence[Path],
) -> TokenTree:
    """Return the tree of ``paths``, without those with a rank for which ``ranked`` has no token."""
    trie = Trie(root)
    nodes = dict[Path, int]({(): 0})
    for path in paths:
        parent = nodes.get(path[:-1])
        depth = len(path) - 1
        if parent is None or depth >= len(ranked) or path[-1] >= len(ranked[depth]):
            continue
        (token, prob) = ranked[depth][path[-1]]
        rates = all_rates[depth]
        kind = rates.confidence_kind(prob)
        gain = trie.gains[parent] * rates.rate(kind, depth + 1)
        nodes[path] = trie.add(parent, token, gain, (rates.label, kind))
    # ``trie.tree`` would sort children by gain; here the nodes stay in the order of ``paths``.
    return TokenTree(
        tuple(trie.tokens), tuple(trie.parents), gain=tuple(trie.gains), origin=tuple(trie.origins)
    )
