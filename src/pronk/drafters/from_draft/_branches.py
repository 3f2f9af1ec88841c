"""What a draft model says along several branches below a text: for drafters whose proposals are trees of its making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from pronk.drafters.from_draft.draft_model import DraftState, ModelProposer
from pronk.drafters.shared.composite import Parts
from pronk.drafters.shared.draft import Draft, DraftLane
from pronk.sampling.sampler import DraftToken
from pronk.speculation.proposer import DraftContext
from pronk.speculation.tree import TokenTree

__all__ = ["Branches", "compute", "model_context"]


class Branches:
    """The branches of one request, in the order in which they were asked for; node 0 is the text's last token.

    A node is asked for, computed by the next pass, and can then say how the text goes on after it.
    """

    def __init__(self, draft: Draft, lane: DraftLane, context: DraftContext[Any], pending: Sequence[int]) -> None:
        """``pending`` is the text that ``lane`` lacks (see :meth:`~pronk.drafters.shared.draft.Draft.level`)."""
        self.context = context
        self.tokens = [context.tokens[-1]]
        self.parents = [-1]
        self.depths = [0]
        self.lane = lane
        self.lead = list(pending[:-1])
        self._draft = draft
        self._ids = list(pending[-1:])
        self._rows: list[Tensor] = []
        self._draft_tokens: dict[int, DraftToken | None] = {}
        self._children: list[dict[int, int]] = [{}]

    @classmethod
    def begin(cls, model: ModelProposer, contexts: Sequence[DraftContext[DraftState]]) -> dict[int, Branches]:
        """Bring the lanes of the contexts for which guessing pays up to their text, but for its last token.

        Returns:
            By the number of their context, roots that are still to be computed; none where the draft has no room.
        """
        chosen = [n for n, c in enumerate(contexts) if model.begins(c, len(contexts))]
        lanes = [contexts[number].state.lane for number in chosen]
        pending = model.draft.level(lanes, [contexts[number] for number in chosen])
        return {
            number: cls(model.draft, lane, contexts[number], new)
            for number, lane, new in zip(chosen, lanes, pending, strict=True)
            if new is not None
        }

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def deepest(self) -> int:
        """How deep a node may be that is computed: the draft has no positions below."""
        return self._draft.room(self.lane) - len(self.lead) - 1

    @property
    def room(self) -> int:
        """How many more nodes the cache has places for."""
        most = self.context.max_depth + self.context.max_nodes + 1
        return min(most, self._draft.places(self.lane) - len(self.lead)) - len(self)

    def ask(self, parent: int, token: int) -> int | None:
        """The node of ``token`` below ``parent``, old or new.

        ``None`` if the draft has no such token or position, or its cache no place.
        """
        node = self._children[parent].get(token)
        if node is not None:
            return node
        ids = self._draft.ids([token])
        if not ids or self.depths[parent] >= self.deepest or self.room <= 0:
            return None
        node = self._children[parent][token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self._ids += ids
        self._children.append({})
        return node

    def knows(self, node: int) -> bool:
        """Whether a pass has computed the node."""
        return node < len(self._rows)

    def path(self, node: int) -> list[int]:
        """The tokens from the first below the root down to ``node``."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def guess(self, node: int) -> DraftToken | None:
        """What the draft chooses after a node that was computed; ``None`` if it has nothing to choose."""
        if node not in self._draft_tokens:
            sampler = self.context.sampler
            with sampler.after(self.path(node)):
                self._draft_tokens[node] = sampler.guess(self._rows[node], self.context.root, draw=False)
        return self._draft_tokens[node]

    def grown(self) -> TokenTree:
        """All nodes, in the draft's ids."""
        return TokenTree(tuple(self._ids), tuple(self.parents))

    def hear(self, rows: Tensor) -> None:
        """Take the logits ``[new nodes, vocab]`` of a pass over what was asked for."""
        self._rows += rows.unbind()
        self.lead = []


def compute(draft: Draft, branches: Sequence[Branches]) -> None:
    """One pass over the nodes that were asked for since the last one; every one of ``branches`` has some."""
    trees = [each.grown() for each in branches]
    rows = draft.branch([each.lane for each in branches], trees, [each.lead for each in branches])
    for each, new in zip(branches, rows, strict=True):
        each.hear(new)


def model_context(context: DraftContext[Parts]) -> DraftContext[DraftState]:
    """What the draft model, the first part of a composite, sees of a request."""
    return cast("DraftContext[DraftState]", replace(context, state=context.state[0]))
