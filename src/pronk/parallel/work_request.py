"""What a worker is asked to compute, as numbers and bytes."""

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
    """One request's rows.

    Attributes:
        job: as the worker's runner takes it.
        own: number of the first row whose outputs are wanted.
    """

    job: ForwardJob
    own: int


@dataclass(frozen=True)
class WorkRequest:
    """A share of a pass.

    Attributes:
        turn: its number.
        rows: of each request.
        moves: slots to be copied first, and where to.
        slots: where ``kept`` goes then.
        kept: what other pools have at these slots, uint8 ``[len(slots), bytes]``.
        collect: numbers of layers whose output is wanted.
    """

    turn: int
    rows: Sequence[WorkRows]
    moves: Sequence[tuple[int, int]] = ()
    slots: NDArray[np.int64] | None = None
    kept: Tensor | None = None
    collect: frozenset[int] = frozenset()

    def numbers(self) -> Tensor:
        """All but the bytes."""
        slots = np.zeros(0, np.int64) if self.slots is None else self.slots
        head = [self.turn, len(self.collect), *sorted(self.collect), len(self.moves), *chain(*self.moves)]
        parts = [np.array([*head, len(slots)], np.int64), slots, np.array([len(self.rows)], np.int64)]
        parts += [_numbers(each) for each in self.rows]
        return torch.from_numpy(np.concatenate(parts))

    @classmethod
    def read(cls, numbers: Tensor, data: Tensor) -> WorkRequest:
        """What :meth:`numbers` and the bytes say.

        Raises:
            ValueError: they say nothing.
        """
        with reading(numbers, "a share of a pass") as left:
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
    # A temperature below 0 is none: the tokens are not to be chosen there.
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
