"""Messages of the driver to a worker, as JSON values and bytes: its rows of a forward pass."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.arrays import Array
from pronk.execution.forward_job import ForwardJob, Segment
from pronk.kv_cache.blocks import BlockTable
from pronk.sampling.stateless import StatelessSampler
from pronk.speculation.tree import TokenTree


@contextmanager
def parsing(message_name: str) -> Generator[None]:
    """Raise a ``ValueError`` about ``message_name`` if the ``with`` block, which parses a message, fails."""
    try:
        yield
    except (ValueError, TypeError) as error:
        msg = f"expected {message_name}, found a malformed one: {error}"
        raise ValueError(msg) from error


def serialize_segment(segment: Segment) -> list[Any]:
    """Serialize a segment: its block table, and the tokens and parents of its tree."""
    block_table, tree = segment.block_table, segment.tree
    numbers = [block_table.length, block_table.num_released, segment.num_computed]
    return [*numbers, block_table.blocks, tree.tokens, tree.parents]


def parse_segment(values: Sequence[Any]) -> Segment:
    """Parse the values of :func:`serialize_segment`.

    ``TokenTree.verify`` is not transmitted: here it is True for the root and False for all other nodes.
    """
    length, num_released, computed, blocks, tokens, parents = values
    block_table = BlockTable(blocks, num_released, length)
    block_table.update_derived()
    tree = TokenTree(tuple(tokens), tuple(parents), verify=(True,) + (False,) * (len(tokens) - 1))
    return Segment(block_table, tree, computed)


@dataclass(frozen=True)
class WorkRows:
    """The rows that one process computes for one job, the token tree of a generation request."""

    job: ForwardJob
    # Index of the first row whose outputs the driver needs; all rows before it are recomputed tokens and ancestors.
    first_own: int


@dataclass(frozen=True)
class WorkRequest:
    """The rows of one forward pass that a worker computes."""

    number: int  # number of this message; the worker's answer repeats the number
    rows: Sequence[WorkRows]  # one entry per job of the worker
    moves: Sequence[tuple[int, int]]  # pairs of slots (source, target) to copy before the forward pass
    slots: NDArray[np.int64]  # slots to write ``kv_rows`` to, after the copies of ``moves``
    kv_rows: Array | None  # KV rows from the driver's pool, uint8 ``[len(slots), bytes]``; ``None`` without slots
    collect: frozenset[int]  # layers (numbers from 1) whose outputs are needed

    def serialize(self) -> list[Any]:
        """Return the request without ``kv_rows`` as JSON values."""
        rows = [_serialize_rows(each) for each in self.rows]
        return [self.number, sorted(self.collect), self.moves, self.slots.tolist(), rows]

    @classmethod
    def parse(cls, values: Sequence[Any], data: Array) -> WorkRequest:
        """Parse the values of :meth:`serialize` and the bytes of ``kv_rows``.

        Raises ``ValueError`` if the values are malformed.
        """
        with parsing("a share of a forward pass"):
            number, collect, moves, slots, rows = values
            kv_rows = data.reshape(len(slots), -1) if slots else None
            parsed = [_parse_rows(*each) for each in rows]
            return cls(number, parsed, moves, np.array(slots, np.int64), kv_rows, frozenset(collect))


def _serialize_rows(rows: WorkRows) -> list[Any]:
    job = rows.job
    numbers = [job.prompt_length, job.logits_nodes.start, rows.first_own, job.all_logits]
    return [*numbers, job.stateless_sampler, serialize_segment(job.segment)]


def _parse_rows(
    prompt_length: int,
    first_logits_node: int,
    first_own: int,
    all_logits: bool,
    sampler: tuple[float, int] | None,
    segment_values: Sequence[Any],
) -> WorkRows:
    segment = parse_segment(segment_values)
    nodes = range(first_logits_node, len(segment.tree))
    stateless_sampler = None if sampler is None else StatelessSampler(*sampler)
    job = ForwardJob(segment, nodes, prompt_length, all_logits=all_logits, stateless_sampler=stateless_sampler)
    return WorkRows(job, first_own)
