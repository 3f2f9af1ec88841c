"""Rows whose first layers a drafter has computed before the target's forward pass.

Kangaroo drafts with the target's own first layers (Liu et al. 2024, section 3.2). The keys and values of these layers,
and the output of the last of them, are already in the target's cache, so the forward pass takes such rows in at a later
layer. Every other drafter leaves this module unused.
"""

from __future__ import annotations

from typing import NamedTuple

from pronk.kv_cache.blocks import BlockTable
from pronk.speculation.tree import TokenTree

__all__ = ["EarlyRows", "StartedRows", "StartedRowsByTable"]


class StartedRows(NamedTuple):
    """Tokens behind a table's committed ones whose first ``layers`` layers are computed."""

    layers: int
    tokens: tuple[int, ...]


class EarlyRows(NamedTuple):
    """Leading ``nodes`` nodes of a segment's tree whose first ``layers`` layers are computed."""

    layers: int
    nodes: int

    @classmethod
    def of(cls, started: StartedRows | None, tree: TokenTree) -> EarlyRows | None:
        """Return the part of ``started`` that ``tree`` can use: the common beginning with its main chain."""
        if started is None:
            return None
        same = zip(started.tokens, tree.tokens[: tree.main_chain], strict=False)
        nodes = next((node for node, (a, b) in enumerate(same) if a != b), min(len(started.tokens), tree.main_chain))
        return cls(started.layers, nodes) if nodes else None


class StartedRowsByTable:
    """Started rows by block table, valid from a step's proposals to its forward pass only."""

    def __init__(self) -> None:
        self._started: dict[int, StartedRows] = {}

    def put(self, block_table: BlockTable, started: StartedRows | None) -> None:
        """Set the started rows behind a table; ``None`` removes them."""
        if started is None:
            self._started.pop(id(block_table), None)
        else:
            self._started[id(block_table)] = started

    def get(self, block_table: BlockTable) -> StartedRows | None:
        """Return the rows behind a table, if there are any."""
        return self._started.get(id(block_table))

    def clear(self) -> None:
        """Remove all rows: blocks may change owners between two steps."""
        self._started.clear()
