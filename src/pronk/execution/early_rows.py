"""Early rows: rows whose first layers a drafter has computed before the target's forward pass.

Kangaroo drafts with the target's own first layers (Liu et al. 2024, section 3.2). The keys and values of these layers,
and the output of the last of them, are then already in the target's cache. The forward pass that verifies the draft
tokens computes only the later layers of these rows. Other drafters do not use this module.
"""

from __future__ import annotations

from typing import NamedTuple

from pronk.kv_cache.blocks import BlockTable
from pronk.speculation.tree import TokenTree

__all__ = ["EarlyRows", "EarlyTokens", "EarlyTokensByTable"]


class EarlyTokens(NamedTuple):
    """Tokens of a request whose first layers a drafter has computed in this step."""

    num_layers: int  # number of first layers computed
    tokens: tuple[int, ...]  # ids of the tokens; their KV slots follow those of the committed tokens


class EarlyRows(NamedTuple):
    """Early rows of a token tree: its first ``num_nodes`` nodes skip the first ``num_layers`` layers."""

    num_layers: int
    num_nodes: int

    @classmethod
    def of(cls, early: EarlyTokens | None, tree: TokenTree) -> EarlyRows | None:
        """Return the leading main-chain nodes of ``tree`` with the tokens of ``early``; ``None`` if none."""
        if early is None:
            return None
        same = zip(early.tokens, tree.tokens[: tree.main_chain], strict=False)
        num_nodes = next((node for node, (a, b) in enumerate(same) if a != b), min(len(early.tokens), tree.main_chain))
        return cls(early.num_layers, num_nodes) if num_nodes else None


class EarlyTokensByTable:
    """Early tokens by block table of the request: set by a drafter, read by the forward pass of the step."""

    def __init__(self) -> None:
        self._early: dict[int, EarlyTokens] = {}  # keys: ``id(block_table)``

    def put(self, block_table: BlockTable, early: EarlyTokens | None) -> None:
        """Set the early tokens of a request; ``None`` removes them."""
        if early is None:
            self._early.pop(id(block_table), None)
        else:
            self._early[id(block_table)] = early

    def get(self, block_table: BlockTable) -> EarlyTokens | None:
        """Return the early tokens of a request, if any."""
        return self._early.get(id(block_table))

    def clear(self) -> None:
        """Remove all entries at the start of a step, when the KV slots may belong to other requests."""
        self._early.clear()
