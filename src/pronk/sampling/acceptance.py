"""Acceptance rules: how the target's token after a node of the draft tree is chosen.

If a child of the node has this token, the child is accepted.

========== ====================================================== ==============================================
rule       a draft token is accepted                              proof
========== ====================================================== ==============================================
coupled    if it equals the token that the target samples         :mod:`pronk.sampling.noise`
rejection  with probability min(1, p / q); siblings one by one    :func:`pronk.sampling.verify.rejection_sample`
block      first children as a chain; others as in rejection      :func:`pronk.sampling.verify.block_verify`
========== ====================================================== ==============================================

p and q are the target's and the drafter's probability of the draft token. Greedy decoding always
takes the argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pronk.base.arrays import Array
from pronk.sampling.sampler import Sampler
from pronk.sampling.stateless import Logits
from pronk.sampling.tree import TokenTree

# ``choose(node)`` returns the target's token after a node of the draft tree.
ChooseToken = Callable[[int], int]


def acceptance_rule(
    sampler: Sampler, tree: TokenTree, logits: Logits, sampled: Mapping[int, int] | None = None
) -> ChooseToken:
    """Return a function from a node to the target's token after it, by the request's acceptance rule.

    Args:
        sampler: request's sampler, positioned after the root; each call of the function appends the
            chosen token.
        tree: draft tokens; the function is called from the root down, along accepted nodes.
        logits: target's logits after each node, ``[nodes, vocab]``.
        sampled: node to the target's token after it, if the executor has already sampled it;
            coupled rule only.
    """
    rule = sampler.params.rule if sampler.params.rejects else "coupled"
    sampled = sampled or {}
    decided_tokens: list[int] = []  # block rule: tokens for later calls, in reverse order

    def choose(node: int) -> int:
        if rule == "coupled":
            token = sampled[node] if node in sampled else sampler.choose(logits[node])
        elif rule == "rejection":
            token = sampler.rejection_sample(
                sampler.distribution(logits[node]), tree.draft_samples(node)
            )
        else:
            decided_tokens.extend(
                [] if decided_tokens else _verify_chain(sampler, tree, logits, node)
            )
            token = decided_tokens.pop()
        sampler.advance(token)
        return token

    return choose


def _verify_chain(sampler: Sampler, tree: TokenTree, logits: Logits, node: int) -> list[int]:
    """Verify the chain of first children below ``node``.

    Return the decided tokens in reverse order.

    The final token is chosen among the other children of the node where the chain stops.
    """
    chain = tree.first_chain(node)
    draft_tokens = [tree.draft_sample(child) for child in chain]

    def distribution(i: int) -> Array:
        with sampler.after([token for token, _ in draft_tokens[:i]]):
            return sampler.distribution(logits[(node, *chain)[i]])

    accepted, p = sampler.block_verify(distribution, draft_tokens)
    tokens = [token for token, _ in draft_tokens[:accepted]]
    with sampler.after(tokens):
        tokens.append(sampler.rejection_sample(p, tree.draft_samples((node, *chain)[accepted])[1:]))
    return tokens[::-1]
