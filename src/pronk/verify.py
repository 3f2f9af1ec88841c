"""Verification: a pure walk down the tree along the target's own choices.

Vocabulary: a *drafted* token is a guess in the tree; it is *accepted* if the target chooses it in its place; the
*bonus* token is the target's choice after the last accepted one, which the pass gives for free. The walk's output is
the accepted tokens and the bonus token, so a step yields at least one.

How the target chooses at a node is not the walk's business: without a look at the guesses (the *coupled* rule,
:mod:`pronk.sampling`), or by trying them one after the other (:func:`reject`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pronk.tree import TokenTree

__all__ = ["Walk", "reject", "walk"]


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


def reject(
    p: Tensor, guesses: Sequence[int], accepts: Callable[[int, float], bool], draw: Callable[[Tensor], int]
) -> int:
    """The target's token where guesses are accepted by chance: algorithm 4 of lookahead decoding (Fu et al. 2024).

    p: the target's distribution of the token; x: a guess, one of the node's children in their order. Each x is accepted
    with probability p(x). If it is not, p(x) becomes 0, p is normalized again, and the next one is tried; after the
    last one the token is drawn from what is left of p. On the trie of some n-grams a walk that chooses like this is the
    paper's loop over the n-grams: one that goes on with a rejected token has p(x) = 0, and after an accepted token
    those remain that go on with it, which are the ones below its node.

    *The token has the law p*, whatever the guesses are, by induction from the last guess back. Let p' be p after the
    rejection of x, and the token a sample of p' if x is rejected (with no guess left it is drawn from it). Then ::

        P(token = x) = p(x) + (1 - p(x)) p'(x) = p(x)    since p'(x) = 0
        P(token = v) = (1 - p(x)) p'(v) = p(v)           for every other v

    *So has the text*: p is conditional on the true context, and by the chain rule the accepted path and the token after
    it, and one step after the other, are a sample of the target. All this asks of the guesses is to be independent of
    the numbers drawn here, given the text so far. So a choice must not be made a second time with its outcome among
    the guesses; and guesses that were learnt from a text of the same seed are none.

    Args:
        p: ``[vocab]`` float64, left as it is.
        guesses: token ids, in the order in which to try them.
        accepts: ``accepts(j, chance)`` is true with probability ``chance``; ``j`` counts the trials.
        draw: ``draw(p)`` is a sample of ``p``.
    """
    p = p.clone()
    for j, x in enumerate(guesses):
        if accepts(j, float(p[x])):
            return x
        p[x] = 0.0
        p /= p.sum()
    return draw(p)
