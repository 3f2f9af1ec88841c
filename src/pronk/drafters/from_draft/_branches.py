"""Several continuations of a text in a draft model's cache, for drafters that propose trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from pronk.drafters.from_draft.draft_model import DraftState, ModelProposer
from pronk.drafters.shared.composite import Parts
from pronk.drafters.shared.draft import DraftLane, DraftRunner
from pronk.sampling.sampler import DraftToken
from pronk.speculation.proposer import DraftContext
from pronk.speculation.tree import TokenTree

__all__ = ["Branches", "compute_new_nodes", "model_context"]


class Branches:
    """Nodes below one request's text, in order of insertion; node 0 is the text's last token."""

    def __init__(self, draft: DraftRunner, lane: DraftLane, context: DraftContext[Any], pending: Sequence[int]) -> None:
        """``pending`` is the text that ``lane`` lacks, from :meth:`DraftRunner.align_lanes`."""
        self.context = context
        self.tokens = [context.tokens[-1]]
        self.parents = [-1]
        self.depths = [0]
        self.lane = lane
        self.pending_text = list(pending[:-1])
        self._draft = draft
        self._ids = list(pending[-1:])
        self._rows: list[Tensor] = []
        self._draft_tokens: dict[int, DraftToken | None] = {}
        self._children: list[dict[int, int]] = [{}]

    @classmethod
    def create(cls, model: ModelProposer, contexts: Sequence[DraftContext[DraftState]]) -> dict[int, Branches]:
        """Return the branches of the contexts for which drafting pays, by index of the context.

        The lanes are aligned with the texts; roots are still to be computed. Contexts without free slots are missing.
        """
        chosen = [n for n, c in enumerate(contexts) if model.begins(c, len(contexts))]
        lanes = [contexts[number].state.lane for number in chosen]
        pending = model.draft.align_lanes(lanes, [contexts[number] for number in chosen])
        return {
            number: cls(model.draft, lane, contexts[number], new)
            for number, lane, new in zip(chosen, lanes, pending, strict=True)
            if new is not None
        }

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Largest depth of a node: the draft model has no positions beyond."""
        return self._draft.num_free_positions(self.lane) - len(self.pending_text) - 1

    @property
    def num_free_nodes(self) -> int:
        """Number of further nodes for which the cache has slots."""
        max_nodes = self.context.max_depth + self.context.max_nodes + 1
        return min(max_nodes, self._draft.num_free_slots(self.lane) - len(self.pending_text)) - len(self)

    def add_node(self, parent: int, token: int) -> int | None:
        """Return the node of ``token`` below ``parent``, added if new; ``None`` if it cannot be computed."""
        node = self._children[parent].get(token)
        if node is not None:
            return node
        ids = self._draft.to_draft_ids([token])
        if not ids or self.depths[parent] >= self.max_depth or self.num_free_nodes <= 0:
            return None
        node = self._children[parent][token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self._ids += ids
        self._children.append({})
        return node

    def is_computed(self, node: int) -> bool:
        """Whether a forward pass has computed the node."""
        return node < len(self._rows)

    def path(self, node: int) -> list[int]:
        """Return the tokens below the root down to ``node``."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def draft_token(self, node: int) -> DraftToken | None:
        """Return the draft's choice after a computed node; ``None`` if every token is excluded."""
        if node not in self._draft_tokens:
            sampler = self.context.sampler
            with sampler.after(self.path(node)):
                self._draft_tokens[node] = sampler.draft_token(self._rows[node], self.context.root, draw=False)
        return self._draft_tokens[node]

    def draft_tree(self) -> TokenTree:
        """Return all nodes, in the draft's ids."""
        return TokenTree(tuple(self._ids), tuple(self.parents))

    def append_logits(self, rows: Tensor) -> None:
        """Store the logits ``[new nodes, vocab]`` of a forward pass over the nodes added since the last one."""
        self._rows += rows.unbind()
        self.pending_text = []


def compute_new_nodes(draft: DraftRunner, branches: Sequence[Branches]) -> None:
    """Run one forward pass over the nodes added since the last one; each of ``branches`` has some."""
    trees = [each.draft_tree() for each in branches]
    rows = draft.forward_trees([each.lane for each in branches], trees, [each.pending_text for each in branches])
    for each, new in zip(branches, rows, strict=True):
        each.append_logits(new)


def model_context(context: DraftContext[Parts]) -> DraftContext[DraftState]:
    """Return a composite's context as the draft model, its first part, receives it."""
    return cast("DraftContext[DraftState]", replace(context, state=context.state[0]))
