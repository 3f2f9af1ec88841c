"""The rules of acceptance: how the target chooses at one node after the other of a request's tree.

========== ================================= ======================== ========================================
rule       a guess is accepted               the tokens depend on     proof
========== ================================= ======================== ========================================
coupled    if the target's own choice, made  logits, seed, position   :mod:`pronk.sampling.noise`: the choice is a
           without it, is the same                                    sample, and nobody looks at the guesses
rejection  with min(1, p/q), one after the   these and the guesses    :func:`pronk.sampling.verify.rejection_sample`
           other
block      chains of first children          these and the guesses    :func:`pronk.sampling.verify.block`
           together, the others one by one
========== ================================= ======================== ========================================

Greedy, all three are the argmax of the logits.
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
    sampler: Sampler, tree: TokenTree, logits: Logits, chosen: Mapping[int, int] | None = None
) -> Choose:
    """The choices of one walk by the rule of the request.

    Args:
        sampler: stands at the root, and is told of every token that is chosen.
        tree: the guesses.
        logits: ``[nodes, vocab]`` of the tree's nodes.
        chosen: what whoever has computed a node's logits has chosen after it already, by the same rule.
    """
    if sampler.params.rejects:
        rule = _Block if sampler.params.rule == "block" else _RejectionRule
        return rule(sampler, tree, logits)
    known = chosen or {}
    return lambda node, _: _advance(sampler, known[node] if node in known else sampler.choose(logits[node]))


def _advance(sampler: Sampler, token: int) -> int:
    sampler.advance(token)
    return token


class _RejectionRule:
    """Tries the guesses below each node, one after the other."""

    def __init__(self, sampler: Sampler, tree: TokenTree, logits: Logits) -> None:
        self.sampler, self.tree, self.logits = sampler, tree, logits

    def __call__(self, node: int, _: int) -> int:
        p = self.sampler.distribution(self.logits[node])
        return _advance(self.sampler, self.sampler.rejection_sample(p, self.tree.draft_tokens(node)))


class _Block(_RejectionRule):
    """Tries the chain of first children below a node together, and at the node where it stops the other children.

    The walk asks node by node; what was decided together is handed out from ``decided``, the last token first.
    """

    def __init__(self, sampler: Sampler, tree: TokenTree, logits: Logits) -> None:
        super().__init__(sampler, tree, logits)
        self.decided: list[int] = []

    def __call__(self, node: int, _: int) -> int:
        if not self.decided:
            self.decided = self._decide(node)
        return _advance(self.sampler, self.decided.pop())

    def _decide(self, node: int) -> list[int]:
        """The tokens after ``node`` up to the first that is not of its chain, in reverse; the chooser stays."""
        sampler, chain = self.sampler, self.tree.first_chain(node)
        draft_tokens = [self.tree.guess(child) for child in chain]

        def law(i: int) -> Tensor:
            with sampler.after([token for token, _ in draft_tokens[:i]]):
                return sampler.distribution(self.logits[(node, *chain)[i]])

        accepted, p = sampler.block(law, draft_tokens)
        tokens = [token for token, _ in draft_tokens[:accepted]]
        with sampler.after(tokens):
            tokens.append(sampler.rejection_sample(p, self.tree.draft_tokens((node, *chain)[accepted])[1:]))
        return tokens[::-1]
