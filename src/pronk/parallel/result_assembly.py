"""Tree parallelism: the rows of each process in a forward pass, and the joining of the results.

*Logits rows* are the rows of an entry's logits, one for each node whose logits are needed. For
shards of trees see :mod:`~pronk.parallel.tree_partition`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np

from pronk import TokenTree
from pronk.backends import BatchEntry, BlockTable, ForwardResult, ModelRunner
from pronk.base.arrays import Array
from pronk.parallel.mirrored_cache import PartitionedTree, RemotePool
from pronk.parallel.tree_partition import ProcessShard, TreeShard
from pronk.parallel.wire_format import WorkRows

# ``fetch(shard_index, shard_rows)`` fetches logits rows of one tree shard from a worker, float32
# ``[rows, vocab]``, or returns ``None`` if the worker is lost.
FetchLogits = Callable[[int, Sequence[int]], Array | None]


def own_logits_nodes(entry: BatchEntry, shard: TreeShard) -> list[int]:
    """Return the nodes of a tree shard whose logits the driver needs.

    Recomputed ancestors are left out: another process computes their logits.
    """
    return [node for node in shard.own_nodes if node in entry.logits_nodes]


def make_work_rows(entry: BatchEntry, shard: TreeShard, lead: Sequence[int]) -> WorkRows:
    """Return the rows that a process computes for one tree shard.

    ``lead`` are the last committed tokens, whose KV rows the process lacks. The process recomputes
    their rows first, as a chain above the shard.
    """
    num_lead = len(lead)
    tree = entry.tree
    block_table = entry.block_table
    if shard.nodes == tuple(range(len(tree))) and not shard.num_ancestors and not lead:
        return WorkRows(entry, 0)
    new_nodes = {node: new_node for new_node, node in enumerate(shard.nodes, num_lead)}
    tokens = (*lead, *(tree.tokens[node] for node in shard.nodes))
    parents = (num_lead - 1 if node == 0 else new_nodes[tree.parents[node]] for node in shard.nodes)
    # The drafts are not verified here, but in the driver.
    verify = (True,) + (False,) * (len(tokens) - 1)
    new_tree = TokenTree(tokens, (*range(-1, num_lead - 1), *parents), verify)
    if lead:
        block_table = BlockTable(
            list(block_table.blocks), block_table.num_released, block_table.length - num_lead
        )
        block_table.update_derived()
    logits_nodes = own_logits_nodes(entry, shard)
    first = new_nodes[logits_nodes[0]] if logits_nodes else len(tokens)
    assert [*range(first, len(tokens))] == [new_nodes[node] for node in logits_nodes]
    new_entry = entry._replace(
        block_table=block_table, tree=new_tree, logits_nodes=range(first, len(tokens))
    )
    return WorkRows(new_entry, num_lead + shard.num_ancestors)


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
        self._offsets = [dict[int, int]() for _ in entries]
        self._positions = [list[tuple[RemotePool, dict[int, int]]]() for _ in entries]

    @property
    def partitioned_trees(self) -> dict[int, PartitionedTree]:
        """Each request's tree and the positions of its KV rows.

        The key is the ``id`` of the request's block table.
        """
        return {
            id(entry.block_table): PartitionedTree(
                entry.tree, driver_offsets, tuple(worker_positions)
            )
            for entry, driver_offsets, worker_positions in zip(
                self.entries, self._offsets, self._positions, strict=True
            )
        }

    def add_driver_result(self, process_shard: ProcessShard, result: ForwardResult) -> None:
        """Store the logits and layer outputs that the driver, this process, has computed."""
        for shard_index, shard in enumerate(process_shard):
            self._offsets[shard.entry] = {node: offset for offset, node in enumerate(shard.nodes)}
            self._set_logits(shard, result.logits[shard_index][:])
            for layer in self.collect:
                outputs = self.hidden[layer][shard.entry]
                outputs[list(shard.own_nodes)] = result.hidden[layer][shard_index][
                    shard.num_ancestors :
                ]

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
        end = 0
        tokens = iter(sampled)

        def next_rows(like: Array, rows: int) -> Array:
            """Read the next ``rows`` rows of ``data``, with the dtype and width of ``like``."""
            nonlocal end
            size = rows * like.shape[-1] * like.itemsize
            end += size
            return data[end - size : end].copy().view(like.dtype).reshape(rows, like.shape[-1])

        for shard_index, shard in enumerate(process_shard):
            entry = self.entries[shard.entry]
            logits = self.logits[shard.entry]
            logits_rows = self._logits_rows(shard)
            if entry.all_logits:
                self._set_logits(shard, next_rows(logits.rows, len(logits_rows)))
            else:
                fetch_rows = partial(fetch, shard_index)
                logits.remote_rows |= {
                    row: (fetch_rows, shard_row) for shard_row, row in enumerate(logits_rows)
                }
            if entry.stateless_sampler is not None:
                # A worker sends -1 for a row with non-finite logits: the driver samples from it
                # itself, and raises.
                row_tokens = zip(logits_rows, islice(tokens, len(logits_rows)), strict=True)
                self.sampled[shard.entry] |= {row: token for row, token in row_tokens if token >= 0}
            positions = {
                node: position
                for position, node in enumerate(shard.nodes, entry.block_table.length)
            }
            self._positions[shard.entry].append((pool, positions))
        for layer in self.collect:
            for shard in process_shard:
                outputs = self.hidden[layer][shard.entry]
                outputs[list(shard.own_nodes)] = next_rows(outputs, len(shard.own_nodes))

    def _logits_rows(self, shard: TreeShard) -> list[int]:
        entry = self.entries[shard.entry]
        return [node - entry.logits_nodes.start for node in own_logits_nodes(entry, shard)]

    def _set_logits(self, shard: TreeShard, rows: Array) -> None:
        logits_rows = self._logits_rows(shard)
        if logits_rows:
            self.logits[shard.entry].rows[logits_rows] = rows
