"""The drafter ``first_of``: tries several drafters in order until one has draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pronk.drafters.combined._parts import default_parts
from pronk.drafters.shared.composite import Composite, CompositeProposer, States
from pronk.speculation.proposer import DraftContext, Drafter
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["FirstOf"]


@dataclass(frozen=True)
class FirstOf(Composite):
    """Options of ``first_of``; ``parts`` are the drafters to combine, in order of precedence."""

    name = "first_of"

    parts: tuple[Drafter, ...] = field(default_factory=default_parts)

    def bind(self, target: Target) -> FirstOfProposer:
        """Bind all drafters to the target and return their combination."""
        return FirstOfProposer(self.bind_parts(target))


class FirstOfProposer(CompositeProposer):
    """Proposer that returns, for each request, the tree of the first drafter that has draft tokens."""

    name = FirstOf.name

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        pending = list(range(len(contexts)))  # indices of contexts that have no such tree yet
        for index, proposer in enumerate(self.parts):
            views = [contexts[i].with_state(contexts[i].state[index]) for i in pending]
            for i, tree in zip(pending, proposer.propose(views), strict=True):
                trees[i] = tree
            pending = [i for i in pending if sum(trees[i].acceptable) == 1]  # 1: only the root
            if not pending:
                break
        return trees
