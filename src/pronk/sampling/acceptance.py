"""Acceptance rules: the target's token at each node of a request's draft tree.

========== ================================= ======================== ========================================
rule       a draft token is accepted         output depends on        proof
========== ================================= ======================== ========================================
coupled    if the target's own sample,       logits, seed, position   :mod:`pronk.sampling.noise`: the sample
           drawn without it, is the same                              does not depend on the draft tokens
rejection  with probability min(1, p/q),     these and the draft      :func:`pronk.sampling.verify.rejection_sample`
           one after the other               tokens
block      chains of first children          these and the draft      :func:`pronk.sampling.verify.block_verify`
           together, the others one by one   tokens
========== ================================= ======================== ========================================

Under greedy decoding all three rules take the argmax of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from pronk.sampling.sampler import Sampler
from pronk.sampling.stateless import Logits
from pronk.speculation.tree import TokenTree

__all__ = ["Choose", "acceptance_rule"]

# ``choose(node, depth)``: see :func:`pronk.sampling.verify.verify_tree`.
Choose = Callable[[int, int], int]


def acceptance_rule(
    sampler: Sampler, tree: TokenTree, logits: Logits, sampled: Mapping[int, int] | None = None
) -> Choose:
    """Return the function that picks the target's token at each node of one walk, by the request's rule.

    Args:
        sampler: positioned at the root; advanced over every picked token.
        tree: draft tokens.
        logits: ``[nodes, vocab]`` of the tree's nodes.
        sampled: tokens that the executor has already sampled, by node; used under the coupled rule only.
    """
    if sampler.params.rejects:
        rule = _BlockRule if sampler.params.rule == "block" else _RejectionRule
        return rule(sampler, tree, logits)
    sampled_tokens = sampled or {}
    return lambda node, _: _advance(
        sampler, sampled_tokens[node] if node in sampled_tokens else sampler.choose(logits[node])
    )


def _advance(sampler: Sampler, token: int) -> int:
    sampler.advance(token)
    return token


class _RejectionRule:
    def __init__(self, sampler: Sampler, tree: TokenTree, logits: Logits) -> None:
        self.sampler, self.tree, self.logits = sampler, tree, logits

    def __call__(self, node: int, _: int) -> int:
        p = self.sampler.distribution(self.logits[node])
        return _advance(self.sampler, self.sampler.rejection_sample(p, self.tree.draft_samples(node)))


class _BlockRule(_RejectionRule):
    """Try the chain of first children together, then the other children of the node where the chain stops.

    :func:`~pronk.sampling.verify.verify_tree` calls the rule node by node. ``remaining_tokens`` holds the tokens of the
    last joint decision that are still to be returned, in reverse order.
    """

    def __init__(self, sampler: Sampler, tree: TokenTree, logits: Logits) -> None:
        super().__init__(sampler, tree, logits)
        self.remaining_tokens: list[int] = []

    def __call__(self, node: int, _: int) -> int:
        if not self.remaining_tokens:
            self.remaining_tokens = self._verify_chain(node)
        return _advance(self.sampler, self.remaining_tokens.pop())

    def _verify_chain(self, node: int) -> list[int]:
        """Return the tokens after ``node`` up to the first outside its chain, in reverse; the context is kept."""
        sampler, chain = self.sampler, self.tree.first_chain(node)
        draft_tokens = [self.tree.draft_sample(child) for child in chain]

        def distribution(i: int) -> Tensor:
            with sampler.after([token for token, _ in draft_tokens[:i]]):
                return sampler.distribution(self.logits[(node, *chain)[i]])

        accepted, p = sampler.block_verify(distribution, draft_tokens)
        tokens = [token for token, _ in draft_tokens[:accepted]]
        with sampler.after(tokens):
            tokens.append(sampler.rejection_sample(p, self.tree.draft_samples((node, *chain)[accepted])[1:]))
        return tokens[::-1]
