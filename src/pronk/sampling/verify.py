"""Verification: a pure walk down the tree along the target's own choices.

Vocabulary: a *drafted* token is a guess in the tree; it is *accepted* if the target chooses it in its place; the
*bonus* token is the target's choice after the last accepted one, which the pass gives for free. The walk's output is
the accepted tokens and the bonus token, so a step yields at least one.

How the target chooses at a node is not the walk's business. There are three rules, and under each the text is a sample
of the target: *coupled* chooses without a look at the guesses (``noise``), *rejection* tries them one after
the other (:func:`rejection_sample`), *block* tries a chain of them together (:func:`block`). The two that try take numbers that
say nothing of the guesses: whoever drew these used none of them, and no number is ever looked at for a second purpose.

Letters: p is the target's distribution of a token, x a guess, q what x was drawn from (``None``: x was not drawn at
random, or nobody knows how; then q is 1 at x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from pronk.speculation.tree import DraftSample, TokenTree

__all__ = ["VerifiedPath", "block", "rejection_sample", "verify_tree"]

# ``accepts(number, chance)`` is true with probability ``chance``; the number tells one trial from the other.
Accepts = Callable[[int, float], bool]


class VerifiedPath(NamedTuple):
    """Where the target's choices led.

    Attributes:
        path: accepted nodes, from the first below the root on.
        tokens: the target's choices in order: the tokens of ``path`` and then the bonus token.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def verify_tree(tree: TokenTree, choose: Callable[[int, int], int]) -> VerifiedPath:
    """Follow the target from the root for as long as the tree contains its choices.

    Args:
        tree: the guesses.
        choose: ``choose(node, depth)`` is the target's token after ``node``, given the tokens it chose before in this
            walk; ``depth`` counts those.
    """
    node, path, tokens = 0, list[int](), list[int]()
    while True:
        token = choose(node, len(tokens))
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            return VerifiedPath(tuple(path), tuple(tokens))
        path.append(child)
        node = child


def rejection_sample(
    p: Tensor, draft_tokens: Sequence[DraftSample], accepts: Accepts, draw: Callable[[Tensor], int]
) -> int:
    """The target's token after a node, where its guesses are accepted one after the other by chance.

    Each x is accepted with probability min(1, p(x) / q(x)). If it is not, p becomes norm(max(0, p - q)) and the next
    one is tried; after the last one the token is drawn from what p has become. For one guess this is speculative
    sampling (Leviathan et al. 2023, Chen et al. 2023); for several it is its recursive form (Miao et al. 2024), where
    each q is that of the guess given the ones before it. A point mass is accepted with probability p(x), and then p(x)
    becomes 0: algorithm 4 of lookahead decoding (Fu et al. 2024). On the trie of some n-grams a walk that chooses like
    this is the paper's loop over them: one that goes on with a rejected token has p(x) = 0, and after an accepted token
    those remain that go on with it, which are the ones below its node.

    *The token has the law p*, by induction from the last guess back. With no guess left it is drawn from it. Let p' be
    p after the rejection of x, and the token a sample of p' if x is rejected. x is v and accepted with probability
    min(q(v), p(v)), so x is rejected with probability 1 - Σ min(p, q) = Σ max(0, p - q), and ::

        P(token = v) = min(p(v), q(v)) + Σ max(0, p - q) × p'(v)
                     = min(p(v), q(v)) + max(0, p(v) - q(v)) = p(v)

    *So has the text*: p is conditional on the true context, and by the chain rule the accepted path and the token after
    it, and one step after the other, are a sample of the target. All this asks of a guess is that q is its law given
    the text and the guesses tried before it. Of one without q nothing is asked but to be independent of the numbers
    drawn here, given the text so far: the law is p for every x, so it is for any. That is why a guess may always be
    taken for a point mass, at the price of fewer acceptances. But a choice must not be made a second time with its
    outcome among the guesses; and guesses that were learnt from a text of the same seed are none.

    Args:
        p: ``[vocab]`` float64, left as it is.
        draft_tokens: in the order in which to try them.
        accepts: ``j`` counts the trials from 0.
        draw: ``draw(p)`` is a sample of ``p``.
    """
    for j, guess in enumerate(draft_tokens):
        if accepts(j, min(1.0, _ratio(p, guess))):
            return guess[0]
        p = _norm(_rest(p, guess), p)
    return draw(p)


def block(p: Callable[[int], Tensor], chain: Sequence[DraftSample], accepts: Accepts) -> tuple[int, Tensor]:
    """How many guesses of a chain are accepted, tried together, and the law of the token after them.

    Block verification (Sun et al. 2024). After x_1 .. x_i the target's law is p_i, and x_(i+1) was drawn from q_i::

        w_0 = 1,  w_i = min(1, w_(i-1) p_(i-1)(x_i) / q_(i-1)(x_i))     S_i = Σ max(0, w_i p_i - q_i)
        h_i = S_i / (S_i + 1 - w_i),  and w_g at the end of the chain

    The number τ of accepted tokens is the largest i whose trial, of chance h_i, succeeds; it is 0 if none does. The
    token after them is drawn from p_g if τ = g, and else from norm(max(0, w_τ p_τ - q_τ)).

    *P(τ ≥ i | x_1 .. x_i) = w_i*, by induction from the end, where it is the chance of the trial. Further up, x_(i+1)
    is v with probability q_i(v) and then τ > i with probability min(1, w_i p_i(v) / q_i(v)), so ::

        P(τ > i | x_1 .. x_i) = Σ min(q_i, w_i p_i) = w_i - S_i
        P(τ ≥ i | x_1 .. x_i) = w_i - S_i + (1 - w_i + S_i) h_i = w_i

    and therefore P(τ = i | x_1 .. x_i) = S_i. *The text is a sample of the target*: given x_1 .. x_i and τ ≥ i, the
    next token is v, as x_(i+1) with τ > i or as the token after x_i = x_τ, with probability ::

        (min(q_i(v), w_i p_i(v)) + S_i × max(0, w_i p_i(v) - q_i(v)) / S_i) / w_i = p_i(v)

    *Never fewer tokens*: one after the other, as :func:`rejection_sample` tries them, τ ≥ i has the probability
    Π min(1, p(x) / q(x)) over the first i, and w_i is at least that, since min(1, w r) ≥ w min(1, r) for w ≤ 1. It is
    more where a token that the target likes better than the drafter makes up for one that it likes less; with point
    masses alone no ratio is above 1, and nothing is gained.

    *In a tree* the chain is that of first children. The token after x_τ has the law above given x_1 .. x_τ and τ,
    whatever became of the guesses below; so where further children of x_τ, each drawn given its earlier siblings and
    nothing below these, are tried against that law by :func:`rejection_sample`, the token has it still. If one is accepted,
    nothing below it was looked at yet, and a new chain begins there. (More tokens than one after the other is then a
    matter of experience: the law after x_τ is another one, to which the siblings may fit less.)

    Args:
        p: ``p(i)`` is p_i, ``[vocab]`` float64; not asked for where nothing depends on it.
        chain: x_1 to x_g, each with its q. Where it ends may depend on its tokens, not on what would have come next.
        accepts: the trial of chance h_i has number ``i``, from 1 to g.
    """
    laws, w = list[Tensor](), [1.0]
    while len(laws) < len(chain) and w[-1] > 0.0:  # of what is impossible nothing is accepted
        laws.append(p(len(laws)))
        w.append(min(1.0, w[-1] * _ratio(laws[-1], chain[len(laws) - 1])))
    for i in range(len(w) - 1, 0, -1):
        if i == len(chain):
            if accepts(i, w[i]):
                return i, p(i)
        elif w[i] > 0.0:
            rest = _rest(laws[i], chain[i], w[i])
            s = float(rest.sum())
            if accepts(i, s / (s + 1.0 - w[i]) if w[i] < 1.0 else 1.0):
                return i, _norm(rest, laws[i])
    law = p(0) if not chain else _norm(_rest(laws[0], chain[0]), laws[0])
    return 0, law


def _ratio(p: Tensor, guess: DraftSample) -> float:
    """p(x) / q(x)."""
    x, q = guess
    return float(p[x]) if q is None or q[x] <= 0.0 else float(p[x] / q[x])


def _rest(p: Tensor, guess: DraftSample, w: float = 1.0) -> Tensor:
    """max(0, w p - q): what the guess leaves to others.

    A token that its q does not have was not drawn from it; then it is a point mass.
    """
    x, q = guess
    if q is not None and q[x] > 0.0:
        return (w * p - q).clamp_(min=0.0)
    rest = w * p
    rest[x] = 0.0
    return rest


def _norm(rest: Tensor, p: Tensor) -> Tensor:
    """``rest`` as a distribution. Where nothing is left of it p was q, and rejected by rounding alone."""
    total = rest.sum()
    return rest / total if total > 0.0 else p
