"""Token trees for drafters with several heads, each of which predicts one of the next tokens.

The node with the path ``(r1, …, rd)`` carries the token of rank ``rd`` of head ``d``
(:mod:`~pronk.drafters.shared.rank_tree`). A head's tokens are ranked once, for all nodes of its depth. Penalties
therefore assume that the likeliest token of each earlier head was generated, even for nodes below other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronk.arrays import Array
from pronk.drafters.shared.rank_tree import Path, best_paths, main_chain_first
from pronk.speculation.acceptance_stats import SourceRates
from pronk.speculation.proposer import DraftContext
from pronk.speculation.tree import Origin, TokenTree

__all__ = ["draft_tree"]

# Number of likeliest tokens per head among which the best tree of a given number of nodes is searched.
_MAX_RANKS = 8


def draft_tree(
    context: DraftContext[Any], logits: Array, sources: Sequence[str], shape: int | Sequence[Path]
) -> TokenTree:
    """Return the tree for one request, within the request's limits of depth and nodes.

    Args:
        context: the request.
        logits: ``[heads, vocab]`` float32; the first head predicts the token after the request's last token.
        sources: for each head, its name in the acceptance statistics.
        shape: paths of ranks, the main chain first; paths beyond the request's limits are left out. With a number of
            nodes instead, the paths are chosen by this step's calibrated probabilities, from the ``_MAX_RANKS``
            likeliest tokens of each head.
    """
    max_depth = min(context.max_depth, len(logits))
    all_rates = [context.policy.acceptance.source(source) for source in sources]
    if isinstance(shape, int):
        size = min(shape, context.max_nodes)
        ranked = _rank_tokens(context, logits, [min(_MAX_RANKS, size)] * max_depth)
        rates = [
            [own.rate(own.confidence_kind(prob), depth) for _, prob in tokens]
            for depth, (own, tokens) in enumerate(zip(all_rates, ranked, strict=False), 1)
        ]
        paths: Sequence[Path] = main_chain_first(best_paths(rates, size))
    else:
        paths = [path for path in shape if len(path) <= max_depth][: context.max_nodes]
        depths = range(max(map(len, paths), default=0))
        counts = [1 + max(path[depth] for path in paths if len(path) > depth) for depth in depths]
        ranked = _rank_tokens(context, logits, counts)
    return _build_tree(context.tokens[-1], ranked, all_rates, paths)


def _rank_tokens(context: DraftContext[Any], logits: Array, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Return for each head ``i`` its ``counts[i]`` likeliest tokens, best first, as (id, probability)."""
    sampler, ranked = context.sampler, list[list[tuple[int, float]]]()
    with sampler.after():
        for row, count in zip(logits, counts, strict=False):
            draft_token = sampler.draft_token(row, context.root, draw=False)
            if draft_token is None:
                break
            ranked.append(draft_token.top_tokens(count))
            sampler.advance(draft_token.token)
    return ranked


def _build_tree(
    root: int, ranked: Sequence[Sequence[tuple[int, float]]], all_rates: Sequence[SourceRates], paths: Sequence[Path]
) -> TokenTree:
    """Return the tree of ``paths``; leave out paths with a rank for which ``ranked`` has no token."""
    tokens, parents = [root], [-1]
    gain, origin = [1.0], list[Origin]([("", 0)])
    nodes: dict[Path, int] = {(): 0}
    for path in paths:
        parent, depth = nodes.get(path[:-1]), len(path) - 1
        if parent is None or depth >= len(ranked) or path[-1] >= len(ranked[depth]):
            continue
        token, prob = ranked[depth][path[-1]]
        nodes[path] = len(tokens)
        tokens.append(token)
        parents.append(parent)
        rates = all_rates[depth]
        kind = rates.confidence_kind(prob)
        origin.append((rates.source, kind))
        gain.append(gain[parent] * rates.rate(kind, depth + 1))
    return TokenTree(tuple(tokens), tuple(parents), gain=tuple(gain), origin=tuple(origin))
