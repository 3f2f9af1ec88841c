"""Requests for shares of a forward pass, serialized as integers and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.execution.forward_job import ForwardJob
from pronk.parallel.wire_format import parse_segment, parsing, serialize_segment, take_integers
from pronk.sampling.stateless import StatelessSampler

__all__ = ["WorkRequest", "WorkRows"]


@dataclass(frozen=True)
class WorkRows:
    """Rows of one generation request.

    Attributes:
        job: job for the worker's model runner.
        first_own: index of the first row whose outputs are needed.
    """

    job: ForwardJob
    first_own: int


@dataclass(frozen=True)
class WorkRequest:
    """A worker's share of a forward pass.

    Attributes:
        number: number of the request, which its answer repeats.
        rows: rows of each generation request.
        moves: pairs of slots (source, target) to copy first.
        slots: slots to write ``kv_rows`` to, after the copies.
        kv_rows: KV rows from the driver's pool, uint8 ``[len(slots), bytes]``.
        collect: numbers of the layers whose outputs are needed.
    """

    number: int
    rows: Sequence[WorkRows]
    moves: Sequence[tuple[int, int]] = ()
    slots: NDArray[np.int64] | None = None
    kv_rows: Tensor | None = None
    collect: frozenset[int] = frozenset()

    def numbers(self) -> Tensor:
        """Serialize the request without ``kv_rows``, int64 ``[n]``."""
        slots = np.zeros(0, np.int64) if self.slots is None else self.slots
        head = [self.number, len(self.collect), *sorted(self.collect), len(self.moves), *chain(*self.moves)]
        parts = [np.array([*head, len(slots)], np.int64), slots, np.array([len(self.rows)], np.int64)]
        parts += [_numbers(each) for each in self.rows]
        return torch.from_numpy(np.concatenate(parts))

    @classmethod
    def read(cls, numbers: Tensor, data: Tensor) -> WorkRequest:
        """Parse the integers of :meth:`numbers` and the bytes of ``kv_rows``.

        Raises:
            ValueError: the integers are truncated.
        """
        with parsing(numbers, "a share of a forward pass") as integers:
            number = next(integers)
            collect = frozenset(take_integers(integers, next(integers)))
            flat = take_integers(integers, 2 * next(integers))
            slots = np.array(take_integers(integers, next(integers)), np.int64)
            rows = [_rows(integers) for _ in range(next(integers))]
        kv_rows = data.view(len(slots), -1) if len(slots) else None
        moves = list(zip(flat[::2], flat[1::2], strict=True))
        return cls(number, rows, moves, slots, kv_rows, collect)


def _numbers(rows: WorkRows) -> NDArray[np.int64]:
    job = rows.job
    # A temperature of -1 means that the worker does not sample.
    temperature, seed = (-1.0, 0) if job.stateless_sampler is None else job.stateless_sampler
    bits = int(np.float64(temperature).view(np.int64))
    head = (job.prompt_length, job.logits_nodes.start, rows.first_own, job.all_logits, bits, seed)
    return np.array([*head, *serialize_segment(job.segment)], np.int64)


def _rows(integers: Iterator[int]) -> WorkRows:
    prompt_length, first, first_own, all_logits, bits, seed = take_integers(integers, 6)
    segment = parse_segment(integers)
    temperature = float(np.int64(bits).view(np.float64))
    stateless_sampler = None if temperature < 0.0 else StatelessSampler(temperature, seed)
    wanted = range(first, len(segment.tree))
    return WorkRows(
        ForwardJob(segment, wanted, prompt_length, all_logits=bool(all_logits), stateless_sampler=stateless_sampler),
        first_own,
    )
