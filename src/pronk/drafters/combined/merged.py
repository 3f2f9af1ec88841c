"""The drafter ``merged``: the union of several drafters' trees, cut to the nodes of largest gain.

Nodes that cannot be accepted (lookahead's window) are left out. :meth:`Trie.merge` computes the gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pronk.checks import check_integer
from pronk.drafters.combined._parts import default_parts
from pronk.drafters.shared.composite import Composite, CompositeProposer, States
from pronk.speculation.proposer import DraftContext, Drafter, Proposer
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree
from pronk.speculation.trie import Trie

__all__ = ["Merged"]


@dataclass(frozen=True)
class Merged(Composite):
    """Options of ``merged``.

    Attributes:
        parts: drafters to combine. If two of them propose a node with equal gains, the acceptance statistics count the
            node for the first one.
        num_nodes: maximum number of draft tokens per step, 1..127.
    """

    name = "merged"

    parts: tuple[Drafter, ...] = field(default_factory=default_parts)
    num_nodes: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, 127)

    def bind(self, target: Target) -> MergedProposer:
        """Bind all drafters to the target and return their combination."""
        return MergedProposer(self.bind_parts(target), self.num_nodes)


class MergedProposer(CompositeProposer):
    """Proposer that merges the trees of several drafters."""

    name = Merged.name

    def __init__(self, parts: Sequence[Proposer[Any]], num_nodes: int) -> None:
        super().__init__(parts)
        self.num_nodes = num_nodes

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        tries = [Trie(context.tokens[-1]) for context in contexts]
        for proposer, trees in zip(self.parts, self.proposals(contexts), strict=True):
            for trie, tree in zip(tries, trees, strict=True):
                trie.merge(tree, (proposer.name, 0))
        return [
            trie.tree(min(self.num_nodes, context.max_nodes)) for trie, context in zip(tries, contexts, strict=True)
        ]
