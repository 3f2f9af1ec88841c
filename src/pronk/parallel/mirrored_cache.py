"""Tree parallelism: the driver's KV pool, and its record of the contents of the workers' KV pools.

All pools are divided into the same numbered blocks, so that a token has the same slot in each. A
*KV row* is the keys and values of one token. A worker's pool has only the KV rows that the worker
computed or received. The driver's pool has those of all committed tokens: on commit, the driver
fetches the KV rows of accepted tokens from the worker that computed them. A worker that lacks KV
rows receives them from the driver, or recomputes them if recomputing is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk import TokenTree
from pronk.backends import BlockTable, PagedCache
from pronk.base.arrays import Array


@dataclass(eq=False)
class RemotePool:
    """The driver's record of the contents of one worker's KV pool."""

    # Bool ``[slots]``: whether the worker's slot has the same contents as the driver's slot.
    valid: NDArray[np.bool_]
    # (source slot, target slot) of each copy that the worker must make in its pool before its next
    # forward pass.
    moves: list[tuple[int, int]] = field(default_factory=list)
    pool_sent: bool = False  # whether the worker has received the size that its pool must have

    def reset(self, num_slots: int) -> None:
        """Record that the worker's KV pool is empty, and must be resized to ``num_slots`` slots."""
        self.valid = np.zeros(num_slots, np.bool_)
        self.moves = []
        self.pool_sent = False


@dataclass(frozen=True)
class PartitionedTree:
    """A request's tree in the last forward pass, and where each node's KV row is in the pools."""

    tree: TokenTree
    # Offset of each node that the driver computed: the node's KV row is at the position
    # ``block_table.length + offset``. With ``None``, the driver computed all nodes, and the offset
    # of a node is its number.
    driver_offsets: Mapping[int, int] | None = None
    # For each worker that computed nodes of the tree: its pool, and the position of each node's KV
    # row in the block table.
    worker_positions: tuple[tuple[RemotePool, Mapping[int, int]], ...] = ()


class MirroredCache(PagedCache):
    """The driver's KV pool, with a record of each worker's KV pool."""

    can_compute_features = False

    def __init__(self, *args: Any, **options: Any) -> None:
        self.remote_pools: list[RemotePool] = []  # records of the workers' pools, one per worker
        # Weak reference to a function that fetches KV rows. From a worker's pool and slots in it,
        # the function returns the KV rows, uint8 ``[slots, bytes]``, or ``None`` if the worker is
        # lost.
        self.fetch: Callable[[], Callable[[RemotePool, NDArray[np.int64]], Array | None] | None] = (
            lambda: None
        )
        # Trees of the last forward pass, by the ``id`` of the request's block table; removed by
        # :meth:`commit_slots`.
        self.partitioned_trees: dict[int, PartitionedTree] = {}
        # Id of the committed token in each slot, int64 ``[slots]``.
        self.tokens = np.zeros(0, np.int64)
        super().__init__(*args, **options)

    def _on_pool_change(self) -> None:
        super()._on_pool_change()
        if len(self.tokens) != self.num_slots:
            self.tokens = np.zeros(self.num_slots, np.int64)
        self.reset_remote_pools()

    def reset_remote_pools(self) -> None:
        """Record that the workers' pools are empty, and must get the size of the driver's pool."""
        for remote_pool in self.remote_pools:
            remote_pool.reset(self.num_slots)

    def add_remote_pool(self) -> RemotePool:
        """Add and return the record of a new worker, whose pool is empty."""
        self.remote_pools.append(RemotePool(np.zeros(self.num_slots, np.bool_)))
        return self.remote_pools[-1]

    def prepare(self, block_table: BlockTable, tokens: int) -> None:
        """Prepare slots as :class:`PagedCache` does.

        The records of the workers' pools mark these slots as invalid, because their contents in the
        driver's pool will change.
        """
        super().prepare(block_table, tokens)
        if tokens > block_table.length:
            self._invalidate(self.slots(block_table, block_table.length, tokens))

    def _copy(self, old: int, new: int) -> None:
        super()._copy(old, new)
        size = self.block_size
        self.tokens[new * size : (new + 1) * size] = self.tokens[old * size : (old + 1) * size]
        self._invalidate(slice(new * size, (new + 1) * size))

    def write_block(self, block: int, data: bytes, tokens: Sequence[int]) -> None:
        """Store the contents of a KV block, and record its tokens.

        The records of the workers' pools mark the block as invalid since :meth:`prepare`.
        """
        super().write_block(block, data, tokens)
        self.tokens[block * self.block_size : (block + 1) * self.block_size] = tokens

    def _invalidate(self, slots: slice | NDArray[np.int64]) -> None:
        for remote_pool in self.remote_pools:
            remote_pool.valid[slots] = False

    def commit_slots(self, block_table: BlockTable, offsets: Sequence[int]) -> None:
        """Commit accepted nodes; fetch the KV rows that only a worker has.

        If the worker is lost, only the nodes that the driver computed are committed, and the engine
        computes the rest of the path again.

        Args:
            block_table: block table of the request.
            offsets: numbers of the accepted nodes, a path from the root.
        """
        partitioned_tree = self.partitioned_trees.pop(id(block_table), None)
        length = block_table.length
        if partitioned_tree is None or partitioned_tree.driver_offsets is None:
            super().commit_slots(block_table, offsets)
        else:
            offset_of_node = partitioned_tree.driver_offsets
            driver_offsets = [offset_of_node[node] for node in offsets if node in offset_of_node]
            super().commit_slots(block_table, driver_offsets)
            self._fetch(block_table, partitioned_tree, offsets[len(driver_offsets) :])
        if partitioned_tree is not None:
            count = block_table.length - length
            self.tokens[self.slots(block_table, length, block_table.length)] = [
                partitioned_tree.tree.tokens[node] for node in offsets[:count]
            ]
            for remote_pool, positions in partitioned_tree.worker_positions:
                computed = [positions[node] for node in offsets[:count] if node in positions]
                self._record_moves(remote_pool, block_table, computed, length)

    def _fetch(
        self, block_table: BlockTable, partitioned_tree: PartitionedTree, missing: Sequence[int]
    ) -> None:
        """Fetch the KV rows of ``missing``, the last nodes of a path, from a worker; commit them.

        The worker that computed the last node also computed the others, because they are its
        ancestors. If the worker is lost, nothing is committed.
        """
        if not missing or (fetch := self.fetch()) is None:
            return
        remote_pool, positions = next(
            entry for entry in partitioned_tree.worker_positions if missing[-1] in entry[1]
        )
        slots = [self.slots(block_table, positions[node], positions[node] + 1) for node in missing]
        kv_rows = fetch(remote_pool, np.concatenate(slots))
        if kv_rows is not None:
            self.import_slots(
                self.slots(block_table, block_table.length, block_table.length + len(missing)),
                kv_rows,
            )
            block_table.length += len(missing)

    def _record_moves(
        self,
        remote_pool: RemotePool,
        block_table: BlockTable,
        positions: Sequence[int],
        length: int,
    ) -> None:
        """Record that a worker must move its KV rows of accepted nodes to the end of the text.

        The rows move from ``positions`` to the positions ``length``, ``length + 1``, ….
        """
        if not positions:
            return
        stop = max(length + len(positions), max(positions) + 1)
        slots = self.slots(block_table, length, stop)
        for index, position in enumerate(positions):
            if position - length != index:
                remote_pool.moves.append((int(slots[position - length]), int(slots[index])))
        remote_pool.valid[slots[: len(positions)]] = True
