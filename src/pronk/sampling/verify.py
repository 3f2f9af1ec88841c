"""Verification: follow the target's tokens down the draft tree.

A *draft token* is a node of the tree. A draft token is *accepted* if it equals the target's token
at its position. The *bonus* token is the target's token after the last accepted draft token; the
forward pass yields it for free. A step returns the accepted tokens and the bonus token: at least
one token.

:mod:`pronk.sampling.acceptance` has the rules by which the target's tokens are chosen; under each
rule the text is a sample of the target. The random numbers of the rejection and block rules are
independent of the draft tokens: no drafter draws with these numbers, and each number is used for
one trial only.

Notation: p is the target's distribution of a token. x is a draft token. q is the distribution that
x was drawn from. If q is ``None``, x was not drawn at random or its distribution is unknown; x is
treated as a point mass, q(x) = 1. A *trial* is one decision to accept or to reject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pronk.base.arrays import Array
from pronk.kernels.exact_math import total
from pronk.sampling.tree import DraftSample, TokenTree

# Function that decides a trial: ``accepts(index, chance)`` is True with probability ``chance``.
# ``index`` is the number of the trial.
AcceptTrial = Callable[[int, float], bool]


class VerifiedPath(NamedTuple):
    """Result of verifying one tree.

    Attributes:
        path: accepted nodes, from a child of the root down.
        tokens: tokens of ``path``, then the bonus token.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of_nodes(cls, tokens: Sequence[int], nodes: Sequence[int], bonus: int) -> VerifiedPath:
        """Return the path of the accepted ``nodes`` of a tree with the token ids ``tokens``."""
        return cls(tuple(nodes), (*[tokens[node] for node in nodes], bonus))


def verify_tree(tree: TokenTree, choose: Callable[[int], int]) -> VerifiedPath:
    """Follow the target's tokens from the root down, as long as nodes of the tree have them.

    ``choose(node)`` returns the target's token after ``node``
    (:func:`pronk.sampling.acceptance.acceptance_rule`).
    """
    node = 0
    path = list[int]()
    tokens = list[int]()
    while True:
        token = choose(node)
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            return VerifiedPath(tuple(path), tuple(tokens))
        path.append(child)
        node = child


def rejection_sample(
    p: Array,
    draft_tokens: Sequence[DraftSample],
    accepts: AcceptTrial,
    draw: Callable[[Array], int],
) -> int:
    """Return the target's token after a node by trying its draft tokens one after the other.

    A draft token x is accepted with probability min(1, p(x) / q(x)). If x is rejected, p becomes
    norm(max(0, p - q)), and the next draft token is tried. After the last rejection the token is
    drawn from the current p. A point mass x is accepted with probability p(x); if it is rejected,
    p(x) becomes 0.

    *The token has distribution p*. Proof by induction from the last draft token back. With no draft
    token left, the token is drawn from p. Otherwise let p' be p after the rejection of x; by
    induction the token is a sample of p' if x is rejected. x = v is drawn and accepted with
    probability min(q(v), p(v)), so x is rejected with probability
    1 - Σ min(p, q) = Σ max(0, p - q), and ::

        P(token = v) = min(p(v), q(v)) + Σ max(0, p - q) × p'(v)
                     = min(p(v), q(v)) + max(0, p(v) - q(v)) = p(v)

    *The text is a sample of the target*. p is conditional on the true context. By the chain rule,
    the accepted path, the token after it and all later steps together are a sample of the target.
    The only requirement is that q is the distribution of the draft token given the text and the
    draft tokens tried before it.

    A draft token without q must be independent of the random numbers of ``accepts`` and ``draw``,
    given the text. Then the token has distribution p for every fixed x, hence for every independent
    x. Any independent draft token may be treated as a point mass, at the price of fewer
    acceptances. Two kinds of tokens are not independent and must not be proposed: a token sampled
    earlier for the same position, and tokens learnt from a text with the same seed.

    *Sources*. For one draft token: speculative sampling (Leviathan et al. 2023, Chen et al. 2023).
    For several draft tokens: its recursive form (Miao et al. 2024). For point masses: algorithm 4
    of lookahead decoding (Fu et al. 2024), which loops over n-grams instead of the nodes of their
    trie. The result is the same: n-grams that continue with a rejected token have p(x) = 0, and
    after an accepted token only the n-grams below its node are left.

    Args:
        p: target's distribution after the node, ``[vocab]`` float64; not modified.
        draft_tokens: children of the node in the order in which they are tried.
        accepts: decides a trial; the index of the child in ``draft_tokens`` is the trial's number.
        draw: ``draw(p)`` returns a sample of ``p``.
    """
    for j, draft_sample in enumerate(draft_tokens):
        if accepts(j, min(1.0, _ratio(p, draft_sample))):
            return draft_sample[0]
        p = _norm(_residual(p, draft_sample), p)
    return draw(p)


def block_verify(
    p: Callable[[int], Array], chain: Sequence[DraftSample], accepts: AcceptTrial
) -> tuple[int, Array]:
    """Return the number of accepted tokens of a chain, and the distribution of the next token.

    The chain x_1 .. x_g is tried as a whole: block verification (Sun et al. 2024). After x_1 .. x_i
    the target's distribution is p_i, and x_(i+1) was drawn from q_i. Trial i succeeds with
    probability h_i::

        w_0 = 1,  w_i = min(1, w_(i-1) p_(i-1)(x_i) / q_(i-1)(x_i))
        S_i = Σ max(0, w_i p_i - q_i)
        h_i = S_i / (S_i + 1 - w_i) for i < g,  h_g = w_g

    The number τ of accepted tokens is the largest i whose trial succeeds, or 0 if no trial
    succeeds. The next token is drawn from p_g if τ = g, and otherwise from
    norm(max(0, w_τ p_τ - q_τ)).

    *P(τ ≥ i | x_1 .. x_i) = w_i*. Proof by induction from the end of the chain, where w_g is the
    probability of the trial. Before the end, x_(i+1) is v with probability q_i(v), and then τ > i
    with probability min(1, w_i p_i(v) / q_i(v)), so ::

        P(τ > i | x_1 .. x_i) = Σ min(q_i, w_i p_i) = w_i - S_i
        P(τ ≥ i | x_1 .. x_i) = w_i - S_i + (1 - w_i + S_i) h_i = w_i

    and therefore P(τ = i | x_1 .. x_i) = S_i. *The text is a sample of the target*: given x_1 ..
    x_i and τ ≥ i, the next token is v, either as x_(i+1) with τ > i or as the token after x_i =
    x_τ, with probability ::

        (min(q_i(v), w_i p_i(v)) + S_i × max(0, w_i p_i(v) - q_i(v)) / S_i) / w_i = p_i(v)

    *Block never accepts fewer tokens than rejection in expectation*. With :func:`rejection_sample`,
    τ ≥ i has probability Π min(1, p(x) / q(x)) over the first i draft tokens. w_i is at least this
    product, since min(1, w r) ≥ w min(1, r) for w ≤ 1. w_i is larger when a token that the target
    prefers more than the drafter compensates for a token that the target prefers less. With point
    masses no ratio exceeds 1, and nothing is gained.

    *In a tree* the chain consists of first children. Given x_1 .. x_τ and τ, the token after x_τ
    has the distribution above, independent of the draft tokens below x_τ. The further children of
    x_τ, each drawn given its earlier siblings and independent of the nodes below these, may be
    tried against that distribution by :func:`rejection_sample`, and the token keeps it. If such a
    child is accepted, none of the nodes below it has been tried yet, and a new chain begins there.
    In a tree, block verification is not proved to accept more tokens than :func:`rejection_sample`:
    the siblings may fit the changed distribution after x_τ less well.

    Args:
        p: ``p(i)`` returns p_i, ``[vocab]`` float64; called only if the result depends on p_i.
        chain: x_1 to x_g, each with its q. The length g may depend on the tokens of the chain, but
            not on the token that would follow.
        accepts: decides trial i, from 1 to g, which succeeds with probability h_i.
    """
    target_probs: list[Array] = []
    w = [1.0]
    # after w = 0, no later token can be accepted
    while len(target_probs) < len(chain) and w[-1] > 0.0:
        target_probs.append(p(len(target_probs)))
        w.append(min(1.0, w[-1] * _ratio(target_probs[-1], chain[len(target_probs) - 1])))
    for i in range(len(w) - 1, 0, -1):
        if i == len(chain):
            if accepts(i, w[i]):
                return i, p(i)
        elif w[i] > 0.0:
            residual = _residual(target_probs[i], chain[i], w[i])
            s = total(residual)
            if accepts(i, s / (s + 1.0 - w[i]) if w[i] < 1.0 else 1.0):
                return i, _norm(residual, target_probs[i])
    return 0, p(0) if not chain else _norm(_residual(target_probs[0], chain[0]), target_probs[0])


def _ratio(p: Array, draft_sample: DraftSample) -> float:
    """Return p(x) / q(x) of a draft token x; p(x) if x is treated as a point mass."""
    x, q = draft_sample
    return float(p[x]) if q is None or q[x] <= 0.0 else float(p[x]) / float(q[x])


def _residual(p: Array, draft_sample: DraftSample, w: float = 1.0) -> Array:
    """Return max(0, w p - q): the distribution after a rejection, not yet normalized.

    If q(x) = 0, x was not drawn from q and is treated as a point mass.
    """
    x, q = draft_sample
    if q is not None and q[x] > 0.0:
        return np.maximum(w * p - q, 0.0)
    residual = w * p
    residual[x] = 0.0
    return residual


def _norm(residual: Array, p: Array) -> Array:
    """Return ``residual`` divided by its sum, the distribution after a rejection.

    If the sum is 0, p equals q up to rounding, and the result is ``p``.
    """
    divisor = total(residual)
    return residual / divisor if divisor > 0.0 else p
