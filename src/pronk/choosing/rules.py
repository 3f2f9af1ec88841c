"""The rules of acceptance: how the target chooses at one node after the other of a request's tree.

========== ================================= ======================== ========================================
rule       a guess is accepted               the tokens depend on     proof
========== ================================= ======================== ========================================
coupled    if the target's own choice, made  logits, seed, position   :mod:`pronk.choosing.noise`: the choice is a
           without it, is the same                                    sample, and nobody looks at the guesses
rejection  with min(1, p/q), one after the   these and the guesses    :func:`pronk.choosing.walk.reject`
           other
block      chains of first children          these and the guesses    :func:`pronk.choosing.walk.block`
           together, the others one by one
========== ================================= ======================== ========================================

Greedy, all three are the argmax of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from pronk.choosing.alone import Logits
from pronk.choosing.chooser import Chooser
from pronk.tree import TokenTree

__all__ = ["Choose", "choices"]

# ``choose(node, depth)``: see :func:`pronk.choosing.walk.walk`.
Choose = Callable[[int, int], int]


def choices(chooser: Chooser, tree: TokenTree, logits: Logits, chosen: Mapping[int, int] | None = None) -> Choose:
    """The choices of one walk by the rule of the request.

    Args:
        chooser: stands at the root, and is told of every token that is chosen.
        tree: the guesses.
        logits: ``[nodes, vocab]`` of the tree's nodes.
        chosen: what whoever has computed a node's logits has chosen after it already, by the same rule.
    """
    if chooser.params.rejects:
        rule = _Block if chooser.params.rule == "block" else _Rejection
        return rule(chooser, tree, logits)
    known = chosen or {}
    return lambda node, _: _told(chooser, known[node] if node in known else chooser.choose(logits[node]))


def _told(chooser: Chooser, token: int) -> int:
    chooser.advance(token)
    return token


class _Rejection:
    """Tries the guesses below each node, one after the other."""

    def __init__(self, chooser: Chooser, tree: TokenTree, logits: Logits) -> None:
        self.chooser, self.tree, self.logits = chooser, tree, logits

    def __call__(self, node: int, _: int) -> int:
        p = self.chooser.distribution(self.logits[node])
        return _told(self.chooser, self.chooser.reject(p, self.tree.guesses(node)))


class _Block(_Rejection):
    """Tries the chain of first children below a node together, and at the node where it stops the other children.

    The walk asks node by node; what was decided together is handed out from ``decided``, the last token first.
    """

    def __init__(self, chooser: Chooser, tree: TokenTree, logits: Logits) -> None:
        super().__init__(chooser, tree, logits)
        self.decided: list[int] = []

    def __call__(self, node: int, _: int) -> int:
        if not self.decided:
            self.decided = self._decide(node)
        return _told(self.chooser, self.decided.pop())

    def _decide(self, node: int) -> list[int]:
        """The tokens after ``node`` up to the first that is not of its chain, in reverse; the chooser stays."""
        chooser, chain = self.chooser, self.tree.first_chain(node)
        guesses = [self.tree.guess(child) for child in chain]

        def law(i: int) -> Tensor:
            with chooser.after([token for token, _ in guesses[:i]]):
                return chooser.distribution(self.logits[(node, *chain)[i]])

        accepted, p = chooser.block(law, guesses)
        tokens = [token for token, _ in guesses[:accepted]]
        with chooser.after(tokens):
            tokens.append(chooser.reject(p, self.tree.guesses((node, *chain)[accepted])[1:]))
        return tokens[::-1]
