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
        if not tree.num_draft_tokens:
            return
        if self._tree is None and self._trie is None:
            self._tree = tree
        else:
            self._merge(tree.tokens[0]).merge(tree)
            if tree.verify is not None:
                self._unacceptable.append(tree)
        if self._costs is not None:
            self.best = self._costs.best(self._gains())
            self.room = self._probability_wrong()

    def _gains(self) -> Sequence[float]:
        """Return the gains of the draft tokens, without the root."""
        if self._trie is not None:
            return self._trie.gains[1:]
        if self._tree is None or self._tree.gain is None:
            return ()
        return self._tree.gain[1:]

    def _probability_wrong(self) -> float:
        """Return the probability that no draft token for the next position is right, 0..1."""
        if self._trie is not None:
            return self._trie.probability_wrong(0)
        tree = self._tree
        if tree is None or tree.gain is None:
            return 1.0
        return max(0.0, 1.0 - sum([tree.gain[node] for node in tree.children(0).values()]))

    def tree(self, root: int, max_nodes: int) -> TokenTree:
        """Return the union, cut to the ``max_nodes`` draft tokens of largest gain.

        Nodes that are computed but never accepted (lookahead's window) are kept. ``root`` is the
        last token of the text.
        """
        if self._tree is not None and self._tree.num_draft_tokens <= max_nodes:
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
