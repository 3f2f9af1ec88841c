"""Tree parallelism: requests of the driver to a worker to compute rows, as integers and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pronk.arrays import Array
from pronk.execution.forward_job import ForwardJob
from pronk.parallel.wire_format import message_integers, parse_segment, serialize_segment, take_integers
from pronk.sampling.stateless import StatelessSampler

__all__ = ["WorkRequest", "WorkRows"]


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
    moves: Sequence[tuple[int, int]] = ()  # pairs of slots (source, target) to copy before the forward pass
    slots: NDArray[np.int64] | None = None  # slots to write ``kv_rows`` to, after the copies of ``moves``
    kv_rows: Array | None = None  # KV rows from the driver's pool, uint8 ``[len(slots), bytes]``
    collect: frozenset[int] = frozenset()  # layers (numbers from 1) whose outputs are needed

    def serialize(self) -> NDArray[np.int64]:
        """Return the request without ``kv_rows`` as integers, int64 ``[n]``."""
        slots = np.zeros(0, np.int64) if self.slots is None else self.slots
        head = [self.number, len(self.collect), *sorted(self.collect), len(self.moves), *chain(*self.moves)]
        parts = [np.array([*head, len(slots)], np.int64), slots, np.array([len(self.rows)], np.int64)]
        parts += [_serialize_rows(rows) for rows in self.rows]
        return np.concatenate(parts)

    @classmethod
    def parse(cls, numbers: NDArray[np.int64], data: Array) -> WorkRequest:
        """Parse the integers of :meth:`serialize` and the bytes of ``kv_rows``.

        Raises:
            ValueError: the integers are truncated.
        """
        with message_integers(numbers, "a share of a forward pass") as integers:
            number = next(integers)
            collect = frozenset(take_integers(integers, next(integers)))
            move_slots = take_integers(integers, 2 * next(integers))  # source, target, source, target, …
            slots = np.array(take_integers(integers, next(integers)), np.int64)
            rows = [_parse_rows(integers) for _ in range(next(integers))]
        kv_rows = data.reshape(len(slots), -1) if len(slots) else None
        moves = list(zip(move_slots[::2], move_slots[1::2], strict=True))
        return cls(number, rows, moves, slots, kv_rows, collect)


def _serialize_rows(rows: WorkRows) -> NDArray[np.int64]:
    job = rows.job
    # A temperature of -1 means that the worker does not sample.
    temperature, seed = (-1.0, 0) if job.stateless_sampler is None else job.stateless_sampler
    float_bits = int(np.float64(temperature).view(np.int64))
    head = (job.prompt_length, job.logits_nodes.start, rows.first_own, job.all_logits, float_bits, seed)
    return np.array([*head, *serialize_segment(job.segment)], np.int64)


def _parse_rows(integers: Iterator[int]) -> WorkRows:
    prompt_length, first_logits_node, first_own, all_logits, float_bits, seed = take_integers(integers, 6)
    segment = parse_segment(integers)
    temperature = float(np.int64(float_bits).view(np.float64))
    stateless_sampler = None if temperature < 0.0 else StatelessSampler(temperature, seed)
    nodes = range(first_logits_node, len(segment.tree))
    return WorkRows(
        ForwardJob(segment, nodes, prompt_length, all_logits=bool(all_logits), stateless_sampler=stateless_sampler),
        first_own,
    )
