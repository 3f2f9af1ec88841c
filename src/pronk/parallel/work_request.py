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
from pronk.parallel.wire_format import of_segment, read_segment, reading, some
from pronk.sampling.stateless import StatelessSampler

__all__ = ["WorkRequest", "WorkRows"]


@dataclass(frozen=True)
class WorkRows:
    """Rows of one generation request.

    Attributes:
        job: job for the worker's model runner.
        own: index of the first row whose outputs are needed.
    """

    job: ForwardJob
    own: int


@dataclass(frozen=True)
class WorkRequest:
    """A worker's share of a forward pass.

    Attributes:
        turn: number of the request, which its answer repeats.
        rows: rows of each generation request.
        moves: pairs of slots (source, target) to copy first.
        slots: slots to write ``kept`` to, after the copies.
        kept: KV rows from the driver's pool, uint8 ``[len(slots), bytes]``.
        collect: numbers of the layers whose outputs are needed.
    """

    turn: int
    rows: Sequence[WorkRows]
    moves: Sequence[tuple[int, int]] = ()
    slots: NDArray[np.int64] | None = None
    kept: Tensor | None = None
    collect: frozenset[int] = frozenset()

    def numbers(self) -> Tensor:
        """Serialize the request without ``kept``, int64 ``[n]``."""
        slots = np.zeros(0, np.int64) if self.slots is None else self.slots
        head = [self.turn, len(self.collect), *sorted(self.collect), len(self.moves), *chain(*self.moves)]
        parts = [np.array([*head, len(slots)], np.int64), slots, np.array([len(self.rows)], np.int64)]
        parts += [_numbers(each) for each in self.rows]
        return torch.from_numpy(np.concatenate(parts))

    @classmethod
    def read(cls, numbers: Tensor, data: Tensor) -> WorkRequest:
        """Parse the integers of :meth:`numbers` and the bytes of ``kept``.

        Raises:
            ValueError: the integers are truncated.
        """
        with reading(numbers, "a share of a forward pass") as left:
            turn = next(left)
            collect = frozenset(some(left, next(left)))
            flat = some(left, 2 * next(left))
            slots = np.array(some(left, next(left)), np.int64)
            rows = [_rows(left) for _ in range(next(left))]
        kept = data.view(len(slots), -1) if len(slots) else None
        moves = list(zip(flat[::2], flat[1::2], strict=True))
        return cls(turn, rows, moves, slots, kept, collect)


def _numbers(rows: WorkRows) -> NDArray[np.int64]:
    job = rows.job
    # A temperature of -1 means that the worker does not sample.
    temperature, seed = (-1.0, 0) if job.stateless_sampler is None else job.stateless_sampler
    bits = int(np.float64(temperature).view(np.int64))
    head = (job.prompt_length, job.wanted.start, rows.own, job.whole, bits, seed)
    return np.array([*head, *of_segment(job.segment)], np.int64)


def _rows(left: Iterator[int]) -> WorkRows:
    prompt_length, first, own, whole, bits, seed = some(left, 6)
    segment = read_segment(left)
    temperature = float(np.int64(bits).view(np.float64))
    stateless_sampler = None if temperature < 0.0 else StatelessSampler(temperature, seed)
    wanted = range(first, len(segment.tree))
    return WorkRows(
        ForwardJob(segment, wanted, prompt_length, whole=bool(whole), stateless_sampler=stateless_sampler), own
    )
