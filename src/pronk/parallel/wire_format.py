"""Messages of the driver to a worker, as JSON values and bytes: the work of a forward pass."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk import TokenTree
from pronk.backends import BlockTable, ForwardJob, Segment
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


def _serialize_segment(segment: Segment) -> list[Any]:
    block_table = segment.block_table
    tree = segment.tree
    numbers = [block_table.length, block_table.num_released, segment.num_computed]
    return [*numbers, block_table.blocks, tree.tokens, tree.parents]


def _parse_segment(values: Sequence[Any]) -> Segment:
    length, num_released, computed, blocks, tokens, parents = values
    block_table = BlockTable(blocks, num_released, length)
    block_table.update_derived()
    # ``verify`` is not transmitted: only the driver verifies.
    tree = TokenTree(tuple(tokens), tuple(parents), verify=(True,) + (False,) * (len(tokens) - 1))
    return Segment(block_table, tree, computed)


@dataclass(frozen=True)
class WorkRows:
    """The rows that one process computes for one job, the token tree of a request."""

    job: ForwardJob
    # Index of the first row with outputs that the driver needs. All rows before it are recomputed
    # tokens and ancestors.
    first_own: int


@dataclass(frozen=True)
class WorkRequest:
    """The rows of one forward pass that a worker computes."""

    number: int  # number of this message; the worker's answer repeats the number
    rows: Sequence[WorkRows]  # one entry per job of the worker
    # Pairs of slots (source, target) to copy before the forward pass.
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
    job = rows.job
    numbers = [job.prompt_length, job.logits_nodes.start, rows.first_own, job.all_logits]
    return [*numbers, job.stateless_sampler, _serialize_segment(job.segment)]


def _parse_rows(values: Sequence[Any]) -> WorkRows:
    prompt_length, first_logits_node, first_own, all_logits, sampler, segment_values = values
    segment = _parse_segment(segment_values)
    nodes = range(first_logits_node, len(segment.tree))
    stateless_sampler = None if sampler is None else StatelessSampler(*sampler)
    job = ForwardJob(
        segment, nodes, prompt_length, all_logits=all_logits, stateless_sampler=stateless_sampler
    )
    return WorkRows(job, first_own)


class LayerCommand(NamedTuple):
    """The driver's command to all workers to run rows through the first layers."""

    pool: tuple[int, int]  # (``num_resizes``, number of blocks) of the driver's pool
    moves: Sequence[Moves]  # copies between slots that the worker makes before the computation
    jobs: Sequence[ForwardJob]  # rows to run; their sampling fields are not sent
    num_layers: int  # number of layers, from the first on; with all layers, the LM head runs, too

    def serialize(self) -> list[Any]:
        """Return the command as JSON values."""
        moves = [(source.tolist(), target.tolist()) for source, target in self.moves]
        return [self.pool, moves, self.num_layers, [*map(_serialize_job, self.jobs)]]

    @classmethod
    def parse(cls, values: Sequence[Any]) -> LayerCommand:
        """Parse the values of :meth:`serialize`.

        Raises:
            ValueError: the values are malformed.
        """
        with _parsing("a command to run layers"):
            (num_resizes, num_blocks), moves, num_layers, jobs = values
            arrays = [
                (np.array(source, np.int64), np.array(target, np.int64)) for source, target in moves
            ]
            return cls((num_resizes, num_blocks), arrays, [*map(_parse_job, jobs)], num_layers)


def _serialize_job(job: ForwardJob) -> list[Any]:
    nodes = job.logits_nodes
    return [job.prompt_length, nodes.start, nodes.stop, _serialize_segment(job.segment)]


def _parse_job(values: Sequence[Any]) -> ForwardJob:
    prompt_length, first, stop, segment = values
    return ForwardJob(_parse_segment(segment), range(first, stop), prompt_length)
