"""Tensor parallelism: KV cache of one process's attention heads, and orders to compute layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.execution.attention import Segment
from pronk.execution.forward_job import ForwardJob, LayerRange
from pronk.kv_cache.paged import PagedCache
from pronk.parallel.wire_format import parse_segment, parsing, serialize_segment, take_integers

__all__ = ["LayerOrder", "SplitCache"]

# Slots to copy from, and slots to copy to, each int64 ``[n]``.
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]


class SplitCache(PagedCache):
    """The KV pool of one process's heads. A token has the same slot in the pools of all processes.

    Attributes:
        num_resizes: number of resizes so far; a worker whose number differs has to resize its pool.
        moves: in the driver, slot copies that the workers have yet to make.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_resizes, self.moves = 0, list[Moves]()
        super().__init__(*args, **options)

    def resize(self, num_blocks: int) -> None:
        """Resize this process's pool; workers resize their pools when they receive the driver's next order."""
        self.num_resizes, self.moves = self.num_resizes + 1, []
        super().resize(num_blocks)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy slots of this process's pool; the workers copy them when they receive the driver's next order."""
        self.moves.append((source, target))
        super().move(source, target)

    def _copy(self, old: int, new: int) -> None:
        super()._copy(old, new)
        inside = np.arange(self.block_size, dtype=np.int64)
        self.moves.append((old * self.block_size + inside, new * self.block_size + inside))


class LayerOrder(NamedTuple):
    """The driver's order to all workers to compute a range of layers."""

    pool: tuple[int, int]  # ``num_resizes`` and number of blocks of the driver's pool
    moves: Sequence[Moves]  # slot copies to make before the computation
    layer_range: LayerRange  # after ``parse``, ``collect`` is empty: only the driver collects layers' outputs
    embedded: bool  # whether the message holds hidden states as input; if not, the worker embeds the tokens

    def serialize(self) -> Tensor:
        """Serialize the order, int64 ``[n]``."""
        layer_range = self.layer_range
        wanted = [-1] if layer_range.logits_rows is None else [len(layer_range.logits_rows), *layer_range.logits_rows]
        head = [*self.pool, int(self.embedded), layer_range.start, layer_range.stop, *wanted, len(self.moves)]
        parts = [np.array(head, np.int64)]
        for source, target in self.moves:
            parts += [np.array([len(source)], np.int64), source, target]
        parts.append(np.array([len(layer_range.jobs)], np.int64))
        parts += [
            np.array([job.prompt_length, *serialize_segment(segment)], np.int64) for job, segment in layer_range.jobs
        ]
        return torch.from_numpy(np.concatenate(parts))

    @classmethod
    def parse(cls, numbers: Tensor) -> LayerOrder:
        """Parse the integers of :meth:`serialize`.

        Raises:
            ValueError: the integers are truncated.
        """
        with parsing(numbers, "an order for a range of layers") as integers:
            number, blocks, embedded, start, stop, count = take_integers(integers, 6)
            wanted = None if count < 0 else take_integers(integers, count)
            moves = list[Moves]()
            for _ in range(next(integers)):
                size = next(integers)
                source, target = (np.array(take_integers(integers, size), np.int64) for _ in range(2))
                moves.append((source, target))
            jobs = [_parse_job(integers) for _ in range(next(integers))]
        return cls((number, blocks), moves, LayerRange(jobs, start, stop, (), wanted), bool(embedded))


def _parse_job(integers: Iterator[int]) -> tuple[ForwardJob, Segment]:
    prompt_length = next(integers)
    segment = parse_segment(integers)
    return ForwardJob(segment, range(0), prompt_length), segment
