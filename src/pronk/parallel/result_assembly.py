"""Tree parallelism: joining of the results of all processes in a forward pass.

*Logits rows* are the rows of an entry's logits, one for each node whose logits are needed. For
shards of trees see :mod:`~pronk.parallel.tree_partition`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np

from pronk.backends import BatchEntry, ForwardResult, ModelRunner
from pronk.base.arrays import Array
from pronk.parallel.mirrored_cache import PartitionedTree, RemotePool
from pronk.parallel.tree_partition import ProcessShard, TreeShard
from pronk.parallel.work_rows import own_logits_nodes

# ``fetch(shard_index, shard_rows)`` fetches logits rows of one tree shard from a worker, float32
# ``[rows, vocab]``, or returns ``None`` if the worker is lost.
FetchLogits = Callable[[int, Sequence[int]], Array | None]


class ScatteredLogits:
    """Logits of one entry, ``[logits rows, vocab]``.

    The rows that a worker has are fetched at the first access.
    """

    def __init__(self, rows: Array, recompute: Callable[[], Array]) -> None:
        """Wrap ``rows``, an array for logits rows that is filled later.

        ``recompute`` computes all rows in this process. It is called if a worker with rows is lost.
        """
        self.rows = rows  # rows that have not been fetched have undefined values
        # For each row that has not been fetched yet, by its index: the function that fetches rows
        # from the worker that has it, and the index of the row in that worker's tree shard.
        self.remote_rows = dict[int, tuple[partial[Array | None], int]]()
        self._recompute = recompute

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: int | slice | list[int], /) -> Array:
        """Return logits rows as float32, after fetching the rows that a worker has."""
        indices = rows if isinstance(rows, list) else range(len(self))[rows]
        self._fetch([indices] if isinstance(indices, int) else indices)
        return self.rows[rows]

    def _fetch(self, rows: Sequence[int]) -> None:
        # {function that fetches rows: {row: row of its shard}}.
        missing = dict[partial[Array | None], dict[int, int]]()
        for row in rows:
            if row in self.remote_rows:
                fetch, shard_row = self.remote_rows[row]
                missing.setdefault(fetch, {})[row] = shard_row
        for fetch, shard_rows in missing.items():
            logits = fetch(list(shard_rows.values()))
            if logits is None:
                self.rows = self._recompute()
                self.remote_rows.clear()
                return
            self.rows[list(shard_rows)] = logits
            for row in shard_rows:
                del self.remote_rows[row]


class _RowReader:
    """Reader of the arrays that a worker sent one after the other as bytes."""

    def __init__(self, data: Array) -> None:
        """Read ``data``, uint8 ``[bytes]``, from its beginning."""
        self._data = data
        self._begin = 0

    def read(self, num_rows: int, like: Array) -> Array:
        """Return the next ``num_rows`` rows, with the dtype and width of ``like``."""
        width = like.shape[-1]
        end = self._begin + num_rows * width * like.itemsize
        rows = self._data[self._begin : end].copy().view(like.dtype).reshape(num_rows, width)
        self._begin = end
        return rows


class AssembledResult:
    """The result of a forward pass, joined from the results of the driver and its workers."""

    def __init__(
        self,
        entries: Sequence[BatchEntry],
        runner: ModelRunner,
        collect: frozenset[int],
        recompute: Callable[[BatchEntry], Array],
    ) -> None:
        """Allocate the arrays of the result.

        Args:
            entries: entries of the batch.
            runner: model runner of the driver.
            collect: numbers of the layers whose outputs are wanted, from 1.
            recompute: returns all logits of an entry, computed in this process; called if a worker
                with logits of the entry is lost.
        """
        config = runner.decoder.config
        cache = runner.cache
        self.entries = entries
        self.collect = sorted(collect)
        self.logits = [
            ScatteredLogits(
                np.empty((len(entry.logits_nodes), config.vocab_size), np.float32),
                partial(recompute, entry),
            )
            for entry in entries
        ]
        # For each entry: the tokens that workers sampled, by index of the logits row.
        self.sampled = [dict[int, int]() for _ in entries]
        # For each collected layer number, the layer's outputs of each entry, ``[nodes, hidden]``.
        sizes = [(len(entry.tree), config.hidden_size) for entry in entries]
        self.hidden = {
            layer: [np.empty(size, cache.dtype) for size in sizes] for layer in self.collect
        }
        # For each entry: where the KV rows of nodes are, by node. In the driver's pool, as offsets
        # from the committed length; in the workers' pools, as positions in the text.
        self._driver_offsets = [dict[int, int]() for _ in entries]
        self._worker_positions = [list[tuple[RemotePool, dict[int, int]]]() for _ in entries]

    @property
    def partitioned_trees(self) -> dict[int, PartitionedTree]:
        """Each request's tree and the positions of its KV rows.

        The key is the ``id`` of the request's block table.
        """
        trees = dict[int, PartitionedTree]()
        for entry, driver_offsets, worker_positions in zip(
            self.entries, self._driver_offsets, self._worker_positions, strict=True
        ):
            tree = PartitionedTree(entry.tree, driver_offsets, tuple(worker_positions))
            trees[id(entry.block_table)] = tree
        return trees

    def add_driver_result(self, process_shard: ProcessShard, result: ForwardResult) -> None:
        """Store the logits and layer outputs that the driver, this process, has computed."""
        for shard_index, shard in enumerate(process_shard):
            offsets = {node: offset for offset, node in enumerate(shard.nodes)}
            self._driver_offsets[shard.entry] = offsets
            self._set_logits(shard, result.logits[shard_index][:])
            own_nodes = list(shard.own_nodes)
            for layer in self.collect:
                rows = result.hidden[layer][shard_index]
                self.hidden[layer][shard.entry][own_nodes] = rows[shard.num_ancestors :]

    def add_worker_result(
        self,
        pool: RemotePool,
        process_shard: ProcessShard,
        sampled: Sequence[int],
        data: Array,
        fetch: FetchLogits,
    ) -> None:
        """Store the logits, sampled tokens and layer outputs of one worker.

        Args:
            pool: record of the worker's KV pool.
            process_shard: nodes that the worker computed.
            sampled: a token per logits row of the entries with a stateless sampler; -1 if logits
                are not finite.
            data: bytes of the logits rows of entries with ``all_logits``, then of the outputs of
                each collected layer, both without rows of recomputed ancestors.
            fetch: fetches the logits rows of entries without ``all_logits`` when they are
                read.
        """
        reader = _RowReader(data)
        tokens = iter(sampled)
        for shard_index, shard in enumerate(process_shard):
            entry = self.entries[shard.entry]
            logits = self.logits[shard.entry]
            logits_rows = self._logits_rows(shard)
            if entry.all_logits:
                self._set_logits(shard, reader.read(len(logits_rows), logits.rows))
            else:
                fetch_rows = partial(fetch, shard_index)
                for shard_row, row in enumerate(logits_rows):
                    logits.remote_rows[row] = (fetch_rows, shard_row)
            if entry.stateless_sampler is not None:
                self._add_sampled(shard, [*islice(tokens, len(logits_rows))])
            first = entry.block_table.length
            positions = {node: position for position, node in enumerate(shard.nodes, first)}
            self._worker_positions[shard.entry].append((pool, positions))
        for layer in self.collect:
            for shard in process_shard:
                outputs = self.hidden[layer][shard.entry]
                own_nodes = list(shard.own_nodes)
                outputs[own_nodes] = reader.read(len(own_nodes), outputs)

    def _add_sampled(self, shard: TreeShard, tokens: Sequence[int]) -> None:
        """Store the tokens that a worker sampled, one per logits row of a tree shard.

        -1 stands for logits that are not finite: the driver samples from them itself, and raises.
        """
        for row, token in zip(self._logits_rows(shard), tokens, strict=True):
            if token >= 0:
                self.sampled[shard.entry][row] = token

    def _logits_rows(self, shard: TreeShard) -> list[int]:
        """Return the indices of a tree shard's logits rows within its entry."""
        entry = self.entries[shard.entry]
        return [node - entry.logits_nodes.start for node in own_logits_nodes(entry, shard)]

    def _set_logits(self, shard: TreeShard, rows: Array) -> None:
        logits_rows = self._logits_rows(shard)
        if logits_rows:
            self.logits[shard.entry].rows[logits_rows] = rows
