"""The draft tokens that several drafters propose for one request in one call."""

from __future__ import annotations

from collections.abc import Sequence

from pronk.drafting.step_costs import ExpectedStep, StepCosts
from pronk.drafting.trie import Trie
from pronk.sampling.tree import TokenTree


class TreeUnion:
    """Union of proposed trees with the same root, and the expected speed of a step with them.

    A single tree stays as it is, because building a tree takes longer than all decisions of a step.

    Attributes:
        best: the fastest step with some of the draft tokens so far.
        room: probability that none of the draft tokens is the next token, 0..1.
    """

    def __init__(self, costs: StepCosts | None) -> None:
        """Create an empty union; ``costs`` are those of the step, ``None`` if they are ignored."""
        self._costs = costs
        self.best = ExpectedStep(1.0, 1.0) if costs is None else costs.plain()
        self.room = 1.0
        self._tree: TokenTree | None = None  # the only tree so far
        self._trie: Trie | None = None  # all trees, if there are several
        # Trees with nodes that are computed but never accepted.
        self._unacceptable: list[TokenTree] = []

    def add(self, tree: TokenTree) -> None:
        """Add a tree, whose draft tokens have gains and origins."""
        if len(tree.tokens) == 1:
            return
        gains: Sequence[float]
        if self._tree is None and self._trie is None:
            self._tree = tree
            gains = tree.gain or ()
            room = 1.0
            if gains:
                first = sum([gains[node] for node in tree.children(0).values()])
                room = max(0.0, 1.0 - first)
        else:
            trie = self._merge(tree.tokens[0])
            trie.merge(tree)
            if tree.verify is not None:
                self._unacceptable.append(tree)
            gains = trie.gains
            room = trie.probability_wrong(0)
        if self._costs is not None:
            self.best = self._costs.best(gains[1:])
            self.room = room

    def tree(self, root: int, max_nodes: int) -> TokenTree:
        """Return the union, cut to the ``max_nodes`` draft tokens of largest gain.

        Nodes that are computed but never accepted (lookahead's window) are kept. ``root`` is the
        last token of the text.
        """
        if self._tree is not None and len(self._tree.tokens) <= 1 + max_nodes:
            return self._tree
        if self._tree is None and self._trie is None:
            return TokenTree.chain([root])
        trie = self._merge(root)
        unacceptable = [tree for tree in self._unacceptable if tree.num_draft_tokens <= max_nodes]
        num_reserved = sum(len(tree) - sum(tree.acceptable) for tree in unacceptable)
        union = trie.tree(max_nodes - num_reserved)
        for tree in unacceptable:
            union = union.with_unacceptable(tree)
        return union

    def _merge(self, root: int) -> Trie:
        """Return the trie of all trees, made when the second tree is added or the union is cut."""
        if self._trie is None:
            self._trie = Trie(root)
        if self._tree is not None:
            tree = self._tree
            self._tree = None
            self._trie.merge(tree)
            if tree.verify is not None:
                self._unacceptable.append(tree)
        return self._trie
