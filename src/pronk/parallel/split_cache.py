"""Tensor parallelism: KV cache of one process's attention heads, and commands to compute layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.execution.forward_job import ForwardJob, LayerRange
from pronk.kv_cache.paged import PagedCache
from pronk.parallel.wire_format import parse_segment, parsing, serialize_segment

# Copies between slots of a KV pool: slots to copy from, and slots to copy to, each int64 ``[n]``.
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]


class SplitCache(PagedCache):
    """The KV pool of one process's heads. A token has the same slot in the pools of all processes."""

    can_project = False

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_resizes = 0  # a worker that receives a new number resizes its own pool
        self.moves = list[Moves]()  # in the driver: copies for the workers to repeat before they compute more layers
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

    def serialize(self) -> list[Any]:
        """Return the command as JSON values."""
        layer_range, rows = self.layer_range, self.layer_range.logits_rows
        moves = [(source.tolist(), target.tolist()) for source, target in self.moves]
        jobs = [(job.prompt_length, serialize_segment(segment)) for job, segment in layer_range.jobs]
        layers = (layer_range.start, layer_range.stop, None if rows is None else [*rows])
        return [self.pool, self.has_hidden, moves, layers, jobs]

    @classmethod
    def parse(cls, values: Sequence[Any]) -> LayerCommand:
        """Parse the values of :meth:`serialize`.

        Raises ``ValueError`` if the values are malformed.
        """
        with parsing("an order for a range of layers"):
            (num_resizes, num_blocks), has_hidden, moves, (start, stop, logits_rows), jobs = values
            arrays = [(np.array(source, np.int64), np.array(target, np.int64)) for source, target in moves]
            segments = [(length, parse_segment(segment)) for length, segment in jobs]
            parsed = [(ForwardJob(segment, range(0), length), segment) for length, segment in segments]
            layer_range = LayerRange(parsed, start, stop, (), logits_rows)
            return cls((num_resizes, num_blocks), arrays, layer_range, has_hidden)
