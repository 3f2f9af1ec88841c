"""Rows of one request in a forward pass."""

from __future__ import annotations

from typing import NamedTuple

from pronk.execution.early_rows import EarlyRows
from pronk.kv_cache.blocks import BlockTable
from pronk.speculation.tree import TokenTree

__all__ = ["Segment"]


class Segment(NamedTuple):
    """One request's rows in a forward pass: the nodes of ``tree``, which follow the committed tokens.

    A row sees the cached tokens of its request, its ancestors in the tree, and itself.
    """

    block_table: BlockTable  # KV slots of the committed tokens, then of the nodes in order
    tree: TokenTree
    # Number of leading nodes that earlier forward passes have computed, as when a drafter adds one depth per pass. They
    # get no rows, and the other nodes attend to them.
    num_computed: int = 0
    # Leading nodes that skip the first layers, because a drafter has already computed these; ``None``: no such nodes.
    early: EarlyRows | None = None

    @property
    def num_rows(self) -> int:
        """Number of nodes that the forward pass computes."""
        return len(self.tree) - self.num_computed
