"""Token trees in a draft model's KV cache, grown by the drafters ``beam`` and ``staged``.

Both drafters add nodes to the tree, compute all new nodes in one forward pass of the draft model,
and read its probabilities of the next token after each node. The proposed tree is a different one:
it may lack unlikely nodes of the cached tree, and it has leaves that the draft model has not
computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pronk import TokenTree
from pronk.base.arrays import Array
from pronk.drafting import (
    DraftCache,
    DraftContext,
    DraftRunner,
    DraftToken,
    ModelProposer,
    States,
    Trie,
    extension_rule,
)


class CachedTree(Trie):
    """Token tree (the target's ids, without gains) below one request's text in the draft's KV cache.

    Attributes:
        context: the request; ``context.state`` is its cache
            (:mod:`pronk.drafting.shared.draft_runner`).
        pending_text: tokens of the text before the root that are not in the KV cache yet, as ids of
            the draft model's vocabulary. The first forward pass computes these tokens; from then on
            the list is empty.
        draft_ids: token id of each node in the draft model's vocabulary.
        logits: for each computed node, the draft model's logits ``[vocab]`` after it.
    """

    def __init__(
        self, draft: DraftRunner, context: DraftContext[DraftCache], missing: Sequence[int]
    ) -> None:
        """Create the root.

        ``missing`` are the draft's ids of all tokens not in the cache, the root's last.
        """
        super().__init__(context.tokens[-1])
        self.context = context
        self.pending_text = list(missing[:-1])
        self.draft_ids = list(missing[-1:])
        self.logits: list[Array] = []
        self._draft = draft
        self._draft_tokens: dict[int, DraftToken | None] = {}

    @classmethod
    def create(
        cls, model: ModelProposer, contexts: Sequence[DraftContext[States]]
    ) -> dict[int, CachedTree]:
        """Return ``{index: new tree}`` of the requests that draft.

        ``model`` is the composite's first part.
        """
        own_contexts = [context.with_state(context.state[0]) for context in contexts]
        active = {
            index: context
            for index, context in enumerate(own_contexts)
            if extension_rule(model, context)(())
        }
        missing_tokens = model.draft.align([*active.values()])
        return {
            index: cls(model.draft, context, missing)
            for (index, context), missing in zip(active.items(), missing_tokens, strict=True)
            if missing is not None  # ``None``: the request cannot draft in this step
        }

    @property
    def num_free_nodes(self) -> int:
        """Number of nodes that can still be added, by free KV slots and by the limits in ``context``."""
        max_size = self.context.max_depth + self.context.max_nodes + 1
        cache = self.context.state
        num_slots = len(cache.block_table.blocks) * cache.pool.block_size
        return min(max_size, num_slots - len(cache.tokens) - len(self.pending_text)) - len(self)

    def add_node(self, parent: int, token: int) -> int | None:
        """Return the child of ``parent`` with the target's token id ``token``; add it if it is new.

        Return ``None`` if the draft model's vocabulary lacks the token, or if the tree is full.
        """
        if (node := self.child(parent, token)) is not None:
            return node
        ids = self._draft.to_draft_ids([token])
        max_depth = self._draft.num_free_positions(self.context.state) - len(self.pending_text) - 1
        if not ids or self.depths[parent] >= max_depth or self.num_free_nodes <= 0:
            return None
        self.draft_ids += ids
        return self.add(parent, token, 1.0, ("", 0))

    def path(self, node: int) -> list[int]:
        """Return the tokens from below the root down to ``node``."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def draft_token(self, node: int) -> DraftToken | None:
        """Return the likeliest token after a computed node.

        ``None`` in the cases of ``Sampler.draft_token``.
        """
        if node not in self._draft_tokens:
            sampler = self.context.sampler
            with sampler.after(self.path(node)):
                self._draft_tokens[node] = sampler.draft_token(
                    self.logits[node], self.context.root, draw=False
                )
        return self._draft_tokens[node]


def compute_new_nodes(draft: DraftRunner, trees: Sequence[CachedTree]) -> None:
    """Compute the new nodes of all trees in one forward pass of the draft.

    Each tree needs a new node.
    """
    own_trees = [TokenTree(tuple(tree.draft_ids), tuple(tree.parents)) for tree in trees]
    rows = draft.forward_trees(
        [tree.context for tree in trees], own_trees, [tree.pending_text for tree in trees]
    )
    for tree, new_rows in zip(trees, rows, strict=True):
        tree.logits.extend(new_rows)
        tree.pending_text = []
