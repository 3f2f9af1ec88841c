"""The drafters ``merged`` and ``first_of``, which combine several drafters.

``merged`` proposes the union of their trees, cut to the nodes of largest gain. Nodes that cannot be
accepted (lookahead's window) are left out. :meth:`Trie.merge` computes the gains. ``first_of``
tries the drafters in order until one has draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pronk.base.checks import check_integer
from pronk.base.keywords import known_keywords
from pronk.drafting.checked_proposals import call_propose
from pronk.drafting.from_outputs.recycling import Recycling
from pronk.drafting.from_text.suffix import Suffix
from pronk.drafting.proposer import DraftContext, Drafter, Proposer, States
from pronk.drafting.shared.composite import Composite
from pronk.drafting.target import Target
from pronk.drafting.trie import Trie
from pronk.sampling.tree import TokenTree
from pronk.sampling.tree_size import MAX_TREE


def _default_parts() -> tuple[Drafter, ...]:
    """Return the default drafters.

    ``suffix`` is good at repeated text, and ``recycling`` nearly always has a proposal.
    """
    return Suffix(min_match=2), Recycling()


@known_keywords
@dataclass(frozen=True)
class Merged(Composite):
    """Options of ``merged``.

    Attributes:
        parts: drafters to combine. If two of them propose a node with equal gains, the acceptance
            statistics count the node for the first one.
        num_nodes: maximum number of draft tokens per step, 1..1023.
    """

    name = "merged"
    row_options = ("num_nodes",)

    parts: tuple[Drafter, ...] = field(default_factory=_default_parts)
    num_nodes: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, MAX_TREE - 1)

    def bind(self, target: Target) -> MergedProposer:
        return MergedProposer(self.bind_parts(target), self.num_nodes)


class MergedProposer(Proposer[States]):
    """Proposer that merges the trees of several drafters."""

    name = Merged.name

    def __init__(self, parts: Sequence[Proposer[Any]], num_nodes: int) -> None:
        self.set_parts(parts)
        self.num_nodes = num_nodes

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        tries = [Trie(context.tokens[-1]) for context in contexts]
        for index, proposer in enumerate(self.parts):
            views = [context.with_state(context.state[index]) for context in contexts]
            for trie, tree in zip(tries, call_propose(proposer, views), strict=True):
                trie.merge(tree, (proposer.label, 0))
        return [
            trie.tree(min(self.num_nodes, each.max_nodes))
            for trie, each in zip(tries, contexts, strict=True)
        ]


@known_keywords
@dataclass(frozen=True)
class FirstOf(Composite):
    """Options of ``first_of``.

    Attributes:
        parts: drafters to combine, in order of precedence.
    """

    name = "first_of"

    parts: tuple[Drafter, ...] = field(default_factory=_default_parts)

    def bind(self, target: Target) -> FirstOfProposer:
        return FirstOfProposer(self.bind_parts(target))


class FirstOfProposer(Proposer[States]):
    """Proposes, for each request, the tree of the first drafter that has draft tokens."""

    name = FirstOf.name

    def __init__(self, parts: Sequence[Proposer[Any]]) -> None:
        self.set_parts(parts)

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        pending = list(range(len(contexts)))  # indices of contexts that have no such tree yet
        for index, proposer in enumerate(self.parts):
            views = [contexts[i].with_state(contexts[i].state[index]) for i in pending]
            for i, tree in zip(pending, call_propose(proposer, views), strict=True):
                # The part's label and rates, so that statistics count the tokens for the part.
                trees[i] = contexts[i].ledger.with_gains(proposer.label, tree)
            pending = [i for i in pending if sum(trees[i].acceptable) == 1]  # 1: only the root
            if not pending:
                break
        return trees
