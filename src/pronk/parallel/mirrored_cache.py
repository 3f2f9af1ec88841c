"""The KV pool of the driver process, and its record of the workers' pools, under tree parallelism.

All pools have the same blocks, and a token has the same slot in each of them. A *KV row* is the contents of one slot:
the keys and values of one token. A worker's pool holds only the KV rows that the worker computed or received. The
driver's pool holds all committed tokens: on commit it fetches the KV rows of accepted tokens that a worker computed.
Another worker receives these rows when it needs them, or recomputes them if that is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.speculation.tree import TokenTree

__all__ = ["MirroredCache", "PartitionedTree", "RemoteCopy"]

# Fetches the contents of slots from a worker, uint8 ``[slots, bytes]``; ``None`` if the worker is gone.
Fetch = Callable[[NDArray[np.int64]], Tensor | None]


@dataclass(eq=False)
class RemoteCopy:
    """The driver's record of one worker's pool."""

    fetch: Fetch
    # Bool ``[slots]``, True where the worker's slot has the contents of the driver's slot.
    valid: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    moves: list[tuple[int, int]] = field(default_factory=list)  # slots (source, target) to copy before the next pass
    pool_sent: bool = False  # whether the worker has received the size of the pool

    def reset(self, slots: int) -> None:
        """Reset the record for a new pool."""
        self.valid, self.moves, self.pool_sent = np.zeros(slots, np.bool_), [], False


@dataclass(frozen=True)
class PartitionedTree:
    """A request's tree in the last forward pass, with the processes that computed its nodes."""

    tree: TokenTree
    # Offset of each of the driver's nodes after the block table's length; ``None`` if the driver computed all nodes, in
    # tree order.
    driver_nodes: Mapping[int, int] | None = None
    # For each worker with nodes of the tree, the position of each node in the block table.
    worker_nodes: tuple[tuple[RemoteCopy, Mapping[int, int]], ...] = ()


class MirroredCache(PagedCache):
    """The driver's KV pool, with a record of the workers' copies.

    Attributes:
        copies: records of the workers' pools.
        partitioned: trees of the last forward pass, by the ``id`` of their block table.
        tokens: committed token of each slot, int64 ``[slots]``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.copies: list[RemoteCopy] = []
        self.partitioned: dict[int, PartitionedTree] = {}
        self.tokens = np.zeros(0, np.int64)
        super().__init__(*args, **options)

    def _on_pool_change(self) -> None:
        super()._on_pool_change()
        if len(self.tokens) != self.num_slots:
            self.tokens = np.zeros(self.num_slots, np.int64)
        self.reset_copies()

    def reset_copies(self) -> None:
        """Mark all slots of the workers' pools as missing; the driver's pool is unchanged."""
        for copy in self.copies:
            copy.reset(self.num_slots)

    def add_copy(self, fetch: Fetch) -> RemoteCopy:
        """Add the record of a worker whose pool is empty."""
        copy = RemoteCopy(fetch)
        copy.reset(self.num_slots)
        self.copies.append(copy)
        return copy

    def prepare(self, block_table: BlockTable, tokens: int) -> None:
        """Prepare slots as :class:`PagedCache` does, and mark them as missing in the workers' pools."""
        super().prepare(block_table, tokens)
        if tokens > block_table.length:
            self._invalidate(self.slots(block_table, block_table.length, tokens))

    def _copy(self, old: int, new: int) -> None:
        super()._copy(old, new)
        size = self.block_size
        self.tokens[new * size : (new + 1) * size] = self.tokens[old * size : (old + 1) * size]
        self._invalidate(slice(new * size, (new + 1) * size))

    def _invalidate(self, slots: slice | NDArray[np.int64]) -> None:
        for copy in self.copies:
            copy.valid[slots] = False

    def commit(self, block_table: BlockTable, offsets: Sequence[int]) -> None:
        """Commit a path of the tree, and fetch the KV rows of its nodes that a worker computed.

        If the worker is gone, only the nodes before its first one are committed; the engine computes the rest again.
        """
        partitioned, length = self.partitioned.pop(id(block_table), None), block_table.length
        if partitioned is None or partitioned.driver_nodes is None:
            super().commit(block_table, offsets)
        else:
            driver_nodes = partitioned.driver_nodes
            driver_offsets = [driver_nodes[offset] for offset in offsets if offset in driver_nodes]
            super().commit(block_table, driver_offsets)
            self._fetch(block_table, partitioned, offsets[len(driver_offsets) :])
        if partitioned is not None:
            count = block_table.length - length
            self.tokens[self.slots(block_table, length, block_table.length)] = [
                partitioned.tree.tokens[node] for node in offsets[:count]
            ]
            for copy, positions in partitioned.worker_nodes:
                self._record_moves(
                    copy, block_table, [positions[node] for node in offsets[:count] if node in positions], length
                )

    def _fetch(self, block_table: BlockTable, partitioned: PartitionedTree, missing: Sequence[int]) -> None:
        """Fetch the KV rows of the nodes ``missing`` from the worker that computed them, and append them."""
        if not missing:
            return
        copy, positions = next(each for each in partitioned.worker_nodes if missing[-1] in each[1])
        data = copy.fetch(
            np.concatenate([self.slots(block_table, p, p + 1) for p in map(positions.__getitem__, missing)])
        )
        if data is not None:
            self.import_slots(self.slots(block_table, block_table.length, block_table.length + len(missing)), data)
            block_table.length += len(missing)

    def _record_moves(self, copy: RemoteCopy, block_table: BlockTable, positions: Sequence[int], length: int) -> None:
        """Record a worker's KV rows of a committed path, and their moves to the slots of the committed text."""
        if not positions:
            return
        stop = max(length + len(positions), max(positions) + 1)
        slots, base = self.slots(block_table, length, stop), length
        for index, position in enumerate(positions):
            if position - base != index:
                copy.moves.append((int(slots[position - base]), int(slots[index])))
        copy.valid[slots[: len(positions)]] = True
