"""Messages of the driver to a worker, as JSON values and bytes: the work of a forward pass."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk import TokenTree
from pronk.backends import BatchEntry, BlockTable
from pronk.base.arrays import Array
from pronk.drafting import StatelessSampler

# Copies between slots of a KV pool: the source slots and the target slots, each int64 ``[n]``.
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]


@contextmanager
def _parsing(message_name: str) -> Generator[None]:
    """Raise a ``ValueError`` that names the message if the ``with`` block fails to parse it."""
    try:
        yield
    except (ValueError, TypeError) as error:
        msg = f"expected {message_name}, found a malformed one: {error}"
        raise ValueError(msg) from error


def _serialize_entry(entry: BatchEntry) -> list[Any]:
    """Return an entry as JSON values, without its fields on sampling."""
    block_table = entry.block_table
    tree = entry.tree
    nodes = entry.logits_nodes
    numbers = [block_table.length, block_table.num_released, entry.num_computed]
    numbers += [nodes.start, nodes.stop, entry.prompt_length]
    return [*numbers, block_table.blocks, tree.tokens, tree.parents]


def _parse_entry(values: Sequence[Any]) -> BatchEntry:
    length, num_released, num_computed, first, stop, prompt_length, blocks, tokens, parents = values
    block_table = BlockTable(blocks, num_released, length)
    block_table.update_derived()
    # ``verify`` is not transmitted: only the driver verifies.
    tree = TokenTree(tuple(tokens), tuple(parents), verify=(True,) + (False,) * (len(tokens) - 1))
    tree.check()
    return BatchEntry(
        block_table, tree, range(first, stop), prompt_length, num_computed=num_computed
    )


@dataclass(frozen=True)
class WorkRows:
    """The rows that one process computes for one request."""

    entry: BatchEntry
    # Index of the first row whose outputs the driver needs; all rows before it are recomputed
    # tokens and ancestors.
    first_own: int


@dataclass(frozen=True)
class WorkRequest:
    """The rows of one forward pass that a worker computes."""

    number: int  # number of this message; the worker's answer repeats the number
    rows: Sequence[WorkRows]  # one element per tree shard of the worker
    # pairs of slots (source, target) to copy before the forward pass
    moves: Sequence[tuple[int, int]]
    slots: NDArray[np.int64]  # slots to write ``kv_rows`` to, after the copies of ``moves``
    # KV rows from the driver's pool, uint8 ``[len(slots), bytes]``; ``None`` without slots.
    kv_rows: Array | None
    collect: frozenset[int]  # layers (numbers from 1) whose outputs are needed

    def serialize(self) -> list[Any]:
        """Return the request without ``kv_rows`` as JSON values."""
        rows = [*map(_serialize_rows, self.rows)]
        return [self.number, sorted(self.collect), self.moves, self.slots.tolist(), rows]

    @classmethod
    def parse(cls, values: Sequence[Any], data: Array) -> WorkRequest:
        """Parse the values of :meth:`serialize`, and the bytes of ``kv_rows``.

        Raises:
            ValueError: the message is malformed.
        """
        with _parsing("a share of a forward pass"):
            number, collect, moves, slots, rows = values
            kv_rows = data.reshape(len(slots), -1) if slots else None
            parsed = [*map(_parse_rows, rows)]
            return cls(
                number, parsed, moves, np.array(slots, np.int64), kv_rows, frozenset(collect)
            )


def _serialize_rows(rows: WorkRows) -> list[Any]:
    entry = rows.entry
    sampling = [entry.all_logits, entry.stateless_sampler]
    return [rows.first_own, *sampling, _serialize_entry(entry)]


def _parse_rows(values: Sequence[Any]) -> WorkRows:
    first_own, all_logits, sampler, entry_values = values
    stateless_sampler = None if sampler is None else StatelessSampler(*sampler)
    entry = _parse_entry(entry_values)
    entry = entry._replace(all_logits=all_logits, stateless_sampler=stateless_sampler)
    return WorkRows(entry, first_own)


class LayerCommand(NamedTuple):
    """The driver's command to all workers to run rows through the first layers."""

    pool: tuple[int, int]  # (``num_resizes``, number of blocks) of the driver's pool
    moves: Sequence[Moves]  # copies between slots that the worker makes before the computation
    # without the fields on sampling: workers send logits to rank 0
    entries: Sequence[BatchEntry]
    num_layers: int  # number of layers, from the first on; with all layers, the LM head runs, too

    def serialize(self) -> list[Any]:
        """Return the command as JSON values."""
        moves = [(source.tolist(), target.tolist()) for source, target in self.moves]
        return [self.pool, moves, self.num_layers, [*map(_serialize_entry, self.entries)]]

    @classmethod
    def parse(cls, values: Sequence[Any]) -> LayerCommand:
        """Parse the values of :meth:`serialize`.

        Raises:
            ValueError: the values are malformed.
        """
        with _parsing("a command to run layers"):
            (num_resizes, num_blocks), moves, num_layers, entries = values
            arrays = [
                (np.array(source, np.int64), np.array(target, np.int64)) for source, target in moves
            ]
            parsed = [*map(_parse_entry, entries)]
            return cls((num_resizes, num_blocks), arrays, parsed, num_layers)
