"""Tensor parallelism: the KV cache of one process's heads, and orders to compute a range of layers."""

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

# Sources and targets of slot copies, each int64 ``[n]``.
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]


class SplitCache(PagedCache):
    """The KV pool of one process's heads; all processes have the same blocks.

    Attributes:
        num_resizes: number of resizes so far, which identifies the current pool.
        moves: batches of slot copies (sources, targets) that the driver has not sent to the workers yet.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_resizes, self.moves = 0, list[Moves]()
        super().__init__(*args, **options)

    def resize(self, num_blocks: int) -> None:
        """Resize the pool; the workers resize their pools when they receive the next order."""
        self.num_resizes, self.moves = self.num_resizes + 1, []
        super().resize(num_blocks)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy slots here now, and in the workers before their next range of layers."""
        self.moves.append((source, target))
        super().move(source, target)

    def _copy(self, old: int, new: int) -> None:
        super()._copy(old, new)
        inside = np.arange(self.block_size, dtype=np.int64)
        self.moves.append((old * self.block_size + inside, new * self.block_size + inside))


class LayerOrder(NamedTuple):
    """The driver's order to all workers to compute a range of layers."""

    pool: tuple[int, int]  # number of the pool (``SplitCache.num_resizes``), and its number of blocks
    moves: Sequence[Moves]  # batches of slot copies to make before the computation
    layer_range: LayerRange  # ``collect`` is not sent, because only the driver collects layers' outputs
    embedded: bool  # whether the order comes with input rows; otherwise the range begins with the embedding

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
