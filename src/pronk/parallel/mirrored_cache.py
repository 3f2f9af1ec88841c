"""Tree parallelism: the driver's KV pool, and its record of the contents of the workers' KV pools.

All pools have the same blocks, and a token has the same slot in each of them. A *KV row* is the contents of one slot:
the keys and values of one token. A worker's pool holds only the KV rows that the worker computed or received. The
driver's pool holds all committed tokens: on commit, the driver fetches the KV rows of accepted tokens from the worker
that computed them. A worker that lacks KV rows receives them from the driver, or recomputes them if that is cheaper.
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

# ``fetch(slots)`` returns the contents of these slots of a worker, uint8 ``[slots, bytes]``; ``None`` if it is gone.
Fetch = Callable[[NDArray[np.int64]], Tensor | None]


@dataclass(eq=False)
class RemoteCopy:
    """The driver's record of the contents of one worker's KV pool."""

    fetch: Fetch
    # Bool ``[slots]``, True where the worker's slot has the contents of the driver's slot.
    valid: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    moves: list[tuple[int, int]] = field(default_factory=list)  # copies between slots that the worker has yet to make
    pool_sent: bool = False  # whether the worker has received the size of the pool

    def reset(self, slots: int) -> None:
        """Record an empty pool of ``slots`` slots."""
        self.valid, self.moves, self.pool_sent = np.zeros(slots, np.bool_), [], False


@dataclass(frozen=True)
class PartitionedTree:
    """A request's tree in the last forward pass, and the place of each node's KV row in the pools."""

    tree: TokenTree
    # For each node that the driver computed, number of slots between the committed tokens and the node's slot; ``None``
    # if the driver computed all nodes, in tree order.
    driver_offsets: Mapping[int, int] | None = None
    # For each worker that computed nodes of the tree, position of each of these nodes in the block table.
    worker_positions: tuple[tuple[RemoteCopy, Mapping[int, int]], ...] = ()


class MirroredCache(PagedCache):
    """The driver's KV pool, with a record of each worker's KV pool.

    Attributes:
        copies: one record per worker.
        partitioned: trees of the last forward pass; the key is the ``id`` of the request's block table.
        tokens: for each slot, the id of its committed token, int64 ``[slots]``.
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
        """Record that the workers' pools are empty; the driver's pool is unchanged."""
        for copy in self.copies:
            copy.reset(self.num_slots)

    def add_copy(self, fetch: Fetch) -> RemoteCopy:
        """Add and return the record of a new worker, whose pool is empty."""
        copy = RemoteCopy(fetch)
        copy.reset(self.num_slots)
        self.copies.append(copy)
        return copy

    def prepare(self, block_table: BlockTable, tokens: int) -> None:
        """Prepare slots as :class:`PagedCache` does, and record that the workers lack their new contents."""
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
        """Commit a path from the root, given by its nodes; fetch the KV rows that a worker computed.

        If that worker is gone, only the nodes that the driver computed are committed; the engine recomputes the others.
        """
        partitioned, length = self.partitioned.pop(id(block_table), None), block_table.length
        if partitioned is None or partitioned.driver_offsets is None:
            super().commit(block_table, offsets)
        else:
            offset_of_node = partitioned.driver_offsets
            driver_offsets = [offset_of_node[node] for node in offsets if node in offset_of_node]
            super().commit(block_table, driver_offsets)
            self._fetch(block_table, partitioned, offsets[len(driver_offsets) :])
        if partitioned is not None:
            count = block_table.length - length
            self.tokens[self.slots(block_table, length, block_table.length)] = [
                partitioned.tree.tokens[node] for node in offsets[:count]
            ]
            for copy, positions in partitioned.worker_positions:
                self._record_moves(
                    copy, block_table, [positions[node] for node in offsets[:count] if node in positions], length
                )

    def _fetch(self, block_table: BlockTable, partitioned: PartitionedTree, missing: Sequence[int]) -> None:
        """Append the KV rows of the nodes ``missing``, fetched from the worker that computed the last of them."""
        if not missing:
            return
        copy, positions = next(each for each in partitioned.worker_positions if missing[-1] in each[1])
        data = copy.fetch(
            np.concatenate([self.slots(block_table, p, p + 1) for p in map(positions.__getitem__, missing)])
        )
        if data is not None:
            self.import_slots(self.slots(block_table, block_table.length, block_table.length + len(missing)), data)
            block_table.length += len(missing)

    def _record_moves(self, copy: RemoteCopy, block_table: BlockTable, positions: Sequence[int], length: int) -> None:
        """Record that a worker has committed KV rows at ``positions``, to move to ``length`` and up."""
        if not positions:
            return
        stop = max(length + len(positions), max(positions) + 1)
        slots, base = self.slots(block_table, length, stop), length
        for index, position in enumerate(positions):
            if position - base != index:
                copy.moves.append((int(slots[position - base]), int(slots[index])))
        copy.valid[slots[: len(positions)]] = True
