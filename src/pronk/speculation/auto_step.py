"""A request in the step that is being decided on: what was offered so far, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass, field

from pronk.drafters.shared.trie import Trie
from pronk.speculation.proposer import DraftContext
from pronk.speculation.source_states import SourceStates
from pronk.speculation.source_value import BestOffer
from pronk.speculation.tree import TokenTree

__all__ = ["AutoStep"]


@dataclass
class AutoStep:
    """A request in the step that is being decided on.

    Attributes:
        context: of the step.
        best: of what was offered; ``None`` where costs are not known, or nobody is to save.
        kind: of the step, by which it is known what asking brings.
        allowance: seconds that may be lost.
        only: the tree, while there is one alone.
        trie: all that was offered, if there are several.
        looking: trees of which some rows only look ahead.
    """

    context: DraftContext[SourceStates]
    best: BestOffer | None
    kind: int
    allowance: float
    only: TokenTree | None = None
    trie: Trie | None = None
    looking: list[TokenTree] = field(default_factory=list)

    def take(self, source: str, tree: TokenTree, requests: int) -> None:
        """A source has offered a tree; the best is another one, where costs are known."""
        if not tree.num_draft_tokens:
            return
        whole = tree.gain is not None and tree.origin is not None and tree.verify is None and tree.probs is None
        if self.only is None and self.trie is None and whole:
            self.only = tree
        else:
            self._merge(tree, source)
        if self.best is not None:
            assert self.context.costs is not None
            gains = self.trie.gains if self.trie is not None else tree.gain or ()
            self.best = BestOffer.of(gains[1:], self.context.costs, requests)

    def unread(self, number: int) -> int:
        """Tokens of the text since a source was last asked, which it may have to read."""
        return len(self.context.tokens) - self.context.state.read.get(number, 0)

    def tree(self, num_nodes: int) -> TokenTree:
        """At most so many guesses, the likeliest of all that was offered, and beside them what only looks ahead."""
        room = min(num_nodes, self.context.max_nodes)
        if self.only is not None and self.only.num_draft_tokens <= room:
            return self.only  # as most often: to put a tree together takes longer than to decide on it
        looking = [tree for tree in self.looking if tree.num_draft_tokens <= self.context.max_nodes]
        window = sum(len(tree) - sum(tree.acceptable) for tree in looking)
        tree = self._merged().tree(min(room, self.context.max_nodes - window))
        for each in looking:
            tree = tree.with_unacceptable(each)
        return tree

    def _merge(self, tree: TokenTree, source: str) -> None:
        self._merged().merge(tree, (source, 0))
        if tree.verify is not None:
            self.looking.append(tree)

    def _merged(self) -> Trie:
        if self.trie is None:
            self.trie = Trie(self.context.tokens[-1])
        if self.only is not None:
            self.trie.merge(self.only)
            self.only = None
        return self.trie
