"""Tensor parallelism: the KV cache of some heads, and serialized orders to compute ranges of layers."""

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

Moves = tuple[NDArray[np.int64], NDArray[np.int64]]


class SplitCache(PagedCache):
    """The KV pool of one process's heads; all processes have the same blocks.

    Attributes:
        num_resizes: number of resizes, which identifies the current pool.
        moves: batches of slot copies (source, target) that the other processes have not received yet.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_resizes, self.moves = 0, list[Moves]()
        super().__init__(*args, **options)

    def resize(self, num_blocks: int) -> None:
        """Resize the pool; the other processes resize theirs with the next order."""
        self.num_resizes, self.moves = self.num_resizes + 1, []
        super().resize(num_blocks)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy slots here, and in the other processes before their next range of layers."""
        self.moves.append((source, target))
        super().move(source, target)

    def _copy(self, old: int, new: int) -> None:
        super()._copy(old, new)
        inside = np.arange(self.block_size, dtype=np.int64)
        self.moves.append((old * self.block_size + inside, new * self.block_size + inside))


class LayerOrder(NamedTuple):
    """An order to compute a range of layers.

    Attributes:
        pool: number of the pool (see :attr:`SplitCache.num_resizes`) and its blocks.
        moves: batches of slot copies to make first.
        layer_range: layers and jobs; the layers to collect are not transmitted.
        embedded: whether the order comes with input rows; otherwise the range begins with the embedding.
    """

    pool: tuple[int, int]
    moves: Sequence[Moves]
    layer_range: LayerRange
    embedded: bool

    def numbers(self) -> Tensor:
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
    def read(cls, numbers: Tensor) -> LayerOrder:
        """Parse the integers of :meth:`numbers`.

        Raises:
            ValueError: the integers are truncated.
        """
        with parsing(numbers, "an order for a range of layers") as integers:
            number, blocks, embedded, start, stop, count = take_integers(integers, 6)
            wanted = None if count < 0 else take_integers(integers, count)
            moves = list[Moves]()
            for _ in range(next(integers)):
                size = next(integers)
                moves.append(
                    (
                        np.array(take_integers(integers, size), np.int64),
                        np.array(take_integers(integers, size), np.int64),
                    )
                )
            jobs = [_job(integers) for _ in range(next(integers))]
        return cls((number, blocks), moves, LayerRange(jobs, start, stop, (), wanted), bool(embedded))


def _job(integers: Iterator[int]) -> tuple[ForwardJob, Segment]:
    prompt_length = next(integers)
    segment = parse_segment(integers)
    return ForwardJob(segment, range(0), prompt_length), segment
