"""Stages of a pass as numbers: what every process of a split model is told, so that all of them do the same."""

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
from pronk.parallel.wire_format import of_segment, read_segment, reading, some

__all__ = ["LayerOrder", "SplitCache"]

Moves = tuple[NDArray[np.int64], NDArray[np.int64]]


class SplitCache(PagedCache):
    """The pool of some heads; others have the same blocks with other heads.

    Attributes:
        sizes: how often it was made anew.
        moves: what was copied from slots to slots since they were told, one batch after the other.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As any pool."""
        self.sizes, self.moves = 0, list[Moves]()
        super().__init__(*args, **options)

    def resize(self, num_blocks: int) -> None:
        """As any pool; all begin anew."""
        self.sizes, self.moves = self.sizes + 1, []
        super().resize(num_blocks)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """As any pool, here and, before the next stage, elsewhere."""
        self.moves.append((source, target))
        super().move(source, target)

    def _copy(self, old: int, new: int) -> None:
        super()._copy(old, new)
        inside = np.arange(self.block_size, dtype=np.int64)
        self.moves.append((old * self.block_size + inside, new * self.block_size + inside))


class LayerOrder(NamedTuple):
    """What all processes are to do next.

    Attributes:
        size: number of the pool, and its blocks.
        moves: to be made first, one batch after the other.
        layer_range: of a pass; what it collects is the first process's.
        embedded: whether it begins with rows that are sent along.
    """

    size: tuple[int, int]
    moves: Sequence[Moves]
    layer_range: LayerRange
    embedded: bool

    def numbers(self) -> Tensor:
        """All of it."""
        layer_range = self.layer_range
        wanted = [-1] if layer_range.wanted is None else [len(layer_range.wanted), *layer_range.wanted]
        head = [*self.size, int(self.embedded), layer_range.start, layer_range.stop, *wanted, len(self.moves)]
        parts = [np.array(head, np.int64)]
        for source, target in self.moves:
            parts += [np.array([len(source)], np.int64), source, target]
        parts.append(np.array([len(layer_range.jobs)], np.int64))
        parts += [np.array([job.prompt_length, *of_segment(segment)], np.int64) for job, segment in layer_range.jobs]
        return torch.from_numpy(np.concatenate(parts))

    @classmethod
    def read(cls, numbers: Tensor) -> LayerOrder:
        """What :meth:`numbers` says.

        Raises:
            ValueError: they say nothing.
        """
        with reading(numbers, "a stage of a pass") as left:
            number, blocks, embedded, start, stop, count = some(left, 6)
            wanted = None if count < 0 else some(left, count)
            moves = list[Moves]()
            for _ in range(next(left)):
                size = next(left)
                moves.append((np.array(some(left, size), np.int64), np.array(some(left, size), np.int64)))
            jobs = [_job(left) for _ in range(next(left))]
        return cls((number, blocks), moves, LayerRange(jobs, start, stop, (), wanted), bool(embedded))


def _job(left: Iterator[int]) -> tuple[ForwardJob, Segment]:
    prompt_length = next(left)
    segment = read_segment(left)
    return ForwardJob(segment, range(0), prompt_length), segment
