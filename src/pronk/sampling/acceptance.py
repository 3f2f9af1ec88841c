"""Acceptance rules: how the target's token after a node of the draft tree is chosen.

If a child of the node has this token, the child is accepted.

========== ====================================================== ==============================================
rule       a draft token is accepted                              proof
========== ====================================================== ==============================================
coupled    if it equals the token that the target samples         :mod:`pronk.sampling.noise`
rejection  with probability min(1, p / q); siblings one by one    :func:`pronk.sampling.verify.rejection_sample`
block      first children as a chain; others as in rejection      :func:`pronk.sampling.verify.block_verify`
========== ====================================================== ==============================================

p and q are the target's and the drafter's probability of the draft token. The target's token depends on logits, seed
and position; under the rejection and block rules also on the draft tokens. Greedy decoding always takes the argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pronk.arrays import Array
from pronk.sampling.sampler import Sampler
from pronk.sampling.stateless import Logits
from pronk.speculation.tree import TokenTree

__all__ = ["ChooseToken", "acceptance_rule"]

# ``choose(node)`` returns the target's token after a node of the draft tree.
ChooseToken = Callable[[int], int]


def acceptance_rule(
    sampler: Sampler, tree: TokenTree, logits: Logits, sampled: Mapping[int, int] | None = None
) -> ChooseToken:
    """Return a function from a node to the target's token after it, by the request's acceptance rule.

    Args:
        sampler: request's sampler, positioned after the root; each call of the function appends the chosen token.
        tree: draft tokens; the function is called from the root down, along accepted nodes.
        logits: target's logits after each node, ``[nodes, vocab]``.
        sampled: node to the target's token after it, if the executor has already sampled it; coupled rule only.
    """
    if not sampler.params.rejects:
        return _CoupledRule(sampler, logits, sampled or {})
    rule = _BlockRule if sampler.params.rule == "block" else _RejectionRule
    return rule(sampler, tree, logits)


def _advance(sampler: Sampler, token: int) -> int:
    sampler.advance(token)
    return token


class _CoupledRule:
    """Sample the target's token without looking at the draft tokens."""

    def __init__(self, sampler: Sampler, logits: Logits, sampled: Mapping[int, int]) -> None:
        self.sampler, self.logits, self.sampled = sampler, logits, sampled

    def __call__(self, node: int) -> int:
        token = self.sampled[node] if node in self.sampled else self.sampler.choose(self.logits[node])
        return _advance(self.sampler, token)


class _RejectionRule:
    """Accept or reject the children of a node one after the other, until one is accepted."""

    def __init__(self, sampler: Sampler, tree: TokenTree, logits: Logits) -> None:
        self.sampler, self.tree, self.logits = sampler, tree, logits

    def __call__(self, node: int) -> int:
        p = self.sampler.distribution(self.logits[node])
        return _advance(self.sampler, self.sampler.rejection_sample(p, self.tree.draft_samples(node)))


class _BlockRule(_RejectionRule):
    """Try the chain of first children together, then the other children of the node where the chain stops.

    Verification of a chain decides several tokens, but each call returns one. ``remaining_tokens`` has the decided
    tokens for later calls, in reverse order.
    """

    def __init__(self, sampler: Sampler, tree: TokenTree, logits: Logits) -> None:
        super().__init__(sampler, tree, logits)
        self.remaining_tokens: list[int] = []

    def __call__(self, node: int) -> int:
        if not self.remaining_tokens:
            self.remaining_tokens = self._verify_chain(node)
        return _advance(self.sampler, self.remaining_tokens.pop())

    def _verify_chain(self, node: int) -> list[int]:
        """Verify the chain of first children below ``node``; return the decided tokens in reverse order."""
        sampler, chain = self.sampler, self.tree.first_chain(node)
        draft_tokens = [self.tree.draft_sample(child) for child in chain]

        def distribution(i: int) -> Array:
            with sampler.after([token for token, _ in draft_tokens[:i]]):
                return sampler.distribution(self.logits[(node, *chain)[i]])

        accepted, p = sampler.block_verify(distribution, draft_tokens)
        tokens = [token for token, _ in draft_tokens[:accepted]]
        with sampler.after(tokens):
            tokens.append(sampler.rejection_sample(p, self.tree.draft_samples((node, *chain)[accepted])[1:]))
        return tokens[::-1]
