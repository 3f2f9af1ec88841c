"""Tensor parallelism: KV cache of one process's attention heads, and commands to compute layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.execution.forward_job import ForwardJob, LayerRange
from pronk.execution.segment import Segment
from pronk.kv_cache.paged import PagedCache
from pronk.parallel.wire_format import message_integers, parse_segment, serialize_segment, take_integers

__all__ = ["LayerCommand", "SplitCache"]

# Copies between slots of a KV pool: slots to copy from, and slots to copy to, each int64 ``[n]``.
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]


class SplitCache(PagedCache):
    """The KV pool of one process's heads. A token has the same slot in the pools of all processes.

    Attributes:
        num_resizes: number of resizes so far; a worker that receives a new number resizes its own pool.
        moves: in the driver, copies that the workers have to repeat before they compute the next layers.
    """

    can_project = False

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_resizes, self.moves = 0, list[Moves]()
        super().__init__(*args, **options)

    def resize(self, num_blocks: int) -> None:
        """Resize this process's pool; on the driver's next command, each worker resizes its own pool."""
        self.num_resizes, self.moves = self.num_resizes + 1, []
        super().resize(num_blocks)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy slots of this process's pool; on the driver's next command, each worker does the same."""
        self.moves.append((source, target))
        super().move(source, target)

    def _copy(self, old: int, new: int) -> None:
        super()._copy(old, new)
        offsets = np.arange(self.block_size, dtype=np.int64)
        self.moves.append((old * self.block_size + offsets, new * self.block_size + offsets))


class LayerCommand(NamedTuple):
    """The driver's command to all workers to compute a range of layers."""

    pool: tuple[int, int]  # (``num_resizes``, number of blocks) of the driver's pool
    moves: Sequence[Moves]  # copies between slots that the worker makes before the computation
    layer_range: LayerRange  # ``collect`` is not serialized: only the driver collects layers' outputs
    has_hidden: bool  # whether the message holds the input hidden states; if False, the worker embeds the tokens

    def serialize(self) -> NDArray[np.int64]:
        """Return the command as integers, int64 ``[n]``."""
        layer_range = self.layer_range
        rows = [-1] if layer_range.logits_rows is None else [len(layer_range.logits_rows), *layer_range.logits_rows]
        head = [*self.pool, int(self.has_hidden), layer_range.start, layer_range.stop, *rows, len(self.moves)]
        parts = [np.array(head, np.int64)]
        for source, target in self.moves:
            parts += [np.array([len(source)], np.int64), source, target]
        parts.append(np.array([len(layer_range.jobs)], np.int64))
        parts += [
            np.array([job.prompt_length, *serialize_segment(segment)], np.int64) for job, segment in layer_range.jobs
        ]
        return np.concatenate(parts)

    @classmethod
    def parse(cls, numbers: NDArray[np.int64]) -> LayerCommand:
        """Parse the integers of :meth:`serialize`.

        Raises:
            ValueError: the integers are truncated.
        """
        with message_integers(numbers, "an order for a range of layers") as integers:
            num_resizes, num_blocks, has_hidden, start, stop, num_rows = take_integers(integers, 6)
            logits_rows = None if num_rows < 0 else take_integers(integers, num_rows)
            moves = list[Moves]()
            for _ in range(next(integers)):
                size = next(integers)
                source, target = (np.array(take_integers(integers, size), np.int64) for _ in range(2))
                moves.append((source, target))
            jobs = [_parse_job(integers) for _ in range(next(integers))]
        return cls((num_resizes, num_blocks), moves, LayerRange(jobs, start, stop, (), logits_rows), bool(has_hidden))


def _parse_job(integers: Iterator[int]) -> tuple[ForwardJob, Segment]:
    prompt_length = next(integers)
    segment = parse_segment(integers)
    return ForwardJob(segment, range(0), prompt_length), segment
