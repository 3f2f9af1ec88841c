"""Acceptance rules: how the target's token after a node of the draft tree is chosen.

If a child of the node has this token, the child is accepted. The modules in brackets have the
proofs that the text is a sample of the target.

coupled
    A draft token is accepted if it equals the token that the target samples
    (:mod:`pronk.sampling.noise`).
rejection
    A draft token is accepted with probability min(1, p / q); siblings are tried one by one
    (:func:`pronk.sampling.verify.rejection_sample`).
block
    The chain of first children is tried as a whole; further siblings are tried as by the rule
    rejection (:func:`pronk.sampling.verify.block_verify`).

p and q are the target's and the drafter's probability of the draft token. Greedy decoding takes the
argmax under every rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pronk.base.arrays import Array
from pronk.sampling.sampler import Sampler
from pronk.sampling.stateless import Logits
from pronk.sampling.tree import TokenTree

# Function from a node of the draft tree to the target's token after this node.
ChooseToken = Callable[[int], int]


def acceptance_rule(
    sampler: Sampler, tree: TokenTree, logits: Logits, sampled: Mapping[int, int] | None = None
) -> ChooseToken:
    """Return a function from a node to the target's token after that node.

    The function follows the request's acceptance rule. The caller goes from the root down, along
    accepted nodes.

    Args:
        sampler: sampler of the request, positioned after the root. Each call of the returned
            function appends the chosen token to the sampler's context.
        tree: draft tokens.
        logits: the target's logits after each node, ``[nodes, vocab]``.
        sampled: the target's tokens after nodes, by node, as far as the executor has already
            sampled them; coupled rule only.
    """
    rule = sampler.params.rule if sampler.params.rejects else "coupled"
    sampled = sampled or {}
    # block rule: tokens already decided for the next calls, the last one first
    decided_tokens: list[int] = []

    def choose(node: int) -> int:
        if rule == "coupled":
            token = sampled[node] if node in sampled else sampler.choose(logits[node])
        elif rule == "rejection":
            p = sampler.distribution(logits[node])
            token = sampler.rejection_sample(p, tree.draft_samples(node))
        else:
            if not decided_tokens:
                decided_tokens.extend(_verify_chain(sampler, tree, logits, node))
            token = decided_tokens.pop()
        sampler.advance(token)
        return token

    return choose


def _verify_chain(sampler: Sampler, tree: TokenTree, logits: Logits, node: int) -> list[int]:
    """Verify the chain of first children below ``node``; return the target's tokens.

    The list has the token after the chain first, then the accepted draft tokens of the chain, last
    one first. The token after the chain is chosen by the rule rejection among the further children
    of the node at which the chain stops.
    """
    chain = tree.first_chain(node)
    nodes = (node, *chain)
    draft_tokens = [tree.draft_sample(child) for child in chain]

    def distribution(i: int) -> Array:
        with sampler.after([token for token, _ in draft_tokens[:i]]):
            return sampler.distribution(logits[nodes[i]])

    accepted, p = sampler.block_verify(distribution, draft_tokens)
    tokens = [token for token, _ in draft_tokens[:accepted]]
    siblings = tree.draft_samples(nodes[accepted])[1:]
    with sampler.after(tokens):
        tokens.append(sampler.rejection_sample(p, siblings))
    return tokens[::-1]
