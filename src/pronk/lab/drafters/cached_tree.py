"""Token trees in a draft model's KV cache, grown by the drafters ``beam`` and ``staged``.

Both drafters add nodes to the tree, compute all new nodes in one forward pass of the draft model,
and read the draft model's probabilities of the next token after each node. The proposed tree
differs from the cached one: it may lack unlikely nodes, and it has leaves that the draft model has
not computed.
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
    """Token tree in the draft model's KV cache, below the text of one request.

    Tokens are ids of the target's vocabulary. The gains of the base class are not used: all are 1.

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
        """Create a tree of the root alone.

        ``missing`` are the tokens of the text that are not in the cache, the root last, as ids of
        the draft model's vocabulary.
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
        """Return new trees by index in ``contexts``, for the requests that draft in this step.

        ``model`` is the first part of a composite drafter, whose state is ``context.state[0]``.
        """
        own_contexts = [context.with_state(context.state[0]) for context in contexts]
        active = {
            index: context
            for index, context in enumerate(own_contexts)
            if extension_rule(model, context)(())
        }
        missing_tokens = model.draft.align([*active.values()])
        trees: dict[int, CachedTree] = {}
        for (index, context), missing in zip(active.items(), missing_tokens, strict=True):
            if missing is not None:  # ``None``: the request cannot draft in this step
                trees[index] = cls(model.draft, context, missing)
        return trees

    @property
    def num_free_nodes(self) -> int:
        """Number of nodes that can still be added: limited by ``context`` and by free KV slots."""
        max_size = self.context.max_depth + self.context.max_nodes + 1
        cache = self.context.state
        num_slots = len(cache.block_table.blocks) * cache.pool.block_size
        num_free_slots = num_slots - len(cache.tokens) - len(self.pending_text)
        return min(max_size, num_free_slots) - len(self)

    def add_node(self, parent: int, token: int) -> int | None:
        """Return the child of ``parent`` with the token ``token``, which is added if it is new.

        ``None`` if the draft model's vocabulary lacks the token, or if the tree is full.
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
        """Return the draft model's likeliest token after a computed node.

        ``None`` if there is none: all tokens are banned, logits overflow, or the guide exceeds its
        work limit.
        """
        if node not in self._draft_tokens:
            sampler = self.context.sampler
            with sampler.after(self.path(node)):
                self._draft_tokens[node] = sampler.draft_token(
                    self.logits[node], self.context.root, draw=False
                )
        return self._draft_tokens[node]


def compute_new_nodes(draft: DraftRunner, trees: Sequence[CachedTree]) -> None:
    """Compute the new nodes of all trees in one forward pass of the draft model.

    Each tree must have at least one new node.
    """
    own_trees = [TokenTree(tuple(tree.draft_ids), tuple(tree.parents)) for tree in trees]
    rows = draft.forward_trees(
        [tree.context for tree in trees], own_trees, [tree.pending_text for tree in trees]
    )
    for tree, new_rows in zip(trees, rows, strict=True):
        tree.logits.extend(new_rows)
        tree.pending_text = []
