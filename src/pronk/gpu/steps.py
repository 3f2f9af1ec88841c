"""Steps of few rows: embedding, layers, LM head, choice of tokens and verification as one graph.

A step has the sizes of a *bucket*: 16, 64 or 128 rows, and powers of 2 for the number of requests
and for the context. Batches with the same bucket share a graph, and rows that a batch lacks are
padding. The host sends the numbers of :mod:`pronk.gpu.layout` and the noise of the rows, and
receives the target's tokens along the accepted paths (:mod:`pronk.gpu.walk`).

Without CUDA, a step has the rows of the batch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pronk.backends import ForwardBatch
from pronk.gpu.choose import Noise, choose
from pronk.gpu.graphs import GraphClock, Graphs, Inputs
from pronk.gpu.layout import LayoutSize, layout_of, measure, pack_layout
from pronk.gpu.model import GpuModel, ModelOutput
from pronk.gpu.walk import walk

ROW_BUCKETS = (16, 64, 128)
# Smallest context of a bucket, in tokens: one split of attention.
_MIN_CONTEXT = 1024


class StepOutput(NamedTuple):
    """Result of a step on the device; the next step overwrites it."""

    output: ModelOutput
    # int32 ``[rows]``: result of :func:`pronk.gpu.walk.walk`; ``None``: no tokens were asked for
    walked: Tensor | None


def bucket_of(size: LayoutSize, block_size: int) -> LayoutSize | None:
    """Return the sizes of the step that has room for a batch; ``None``: no step has."""
    rows = next((rows for rows in ROW_BUCKETS if rows >= size.rows), None)
    if rows is None or size.depth > rows or size.paths > rows:
        return None
    pages = context_bucket(size.pages, block_size)
    return LayoutSize(rows, triton.next_power_of_2(size.entries), pages, rows, rows)


def context_bucket(pages: int, block_size: int) -> int:
    """Return the number of blocks of the smallest context that has room for ``pages`` blocks."""
    return max(_MIN_CONTEXT // block_size, triton.next_power_of_2(pages))


class Steps:
    """Runs the steps of a model, each bucket by a graph of its own.

    Attributes:
        model: the model.
        pads: whether a step has the sizes of its bucket; on a CPU, only tests want that.
        graphs: the recorded steps.
    """

    def __init__(self, model: GpuModel, clock: GraphClock) -> None:
        self.model = model
        self.pads = model.device.type == "cuda"
        self.graphs = Graphs[StepOutput](model.device, lambda: model.version, clock)

    def run(
        self,
        batch: ForwardBatch,
        collect: frozenset[int],
        make_noise: Callable[[int], Noise] | None,
    ) -> StepOutput | None:
        """Run a batch; return ``None`` if it is too large for a step.

        Args:
            batch: the rows.
            collect: layers whose output is returned.
            make_noise: returns the noise of all rows, for the number of rows of the step; ``None``
                if no tokens are chosen.
        """
        pool = self.model.pool
        needed = measure(batch, pool)
        bucket = bucket_of(needed, pool.block_size)
        if bucket is None:
            return None
        size = bucket if self.pads else needed
        self.model.reserve_positions(size.pages * pool.block_size)
        numbers = pack_layout(batch, pool, size, pool.free_slot)
        noise = () if make_noise is None else make_noise(size.rows)
        inputs = [torch.from_numpy(part) for part in (numbers, *noise)]
        key = (size, collect, len(inputs))
        return self.graphs.run(key, partial(self._compute, size, collect), inputs)

    @torch.inference_mode()
    def _compute(self, size: LayoutSize, collect: frozenset[int], inputs: Inputs) -> StepOutput:
        """Compute a step from the array of :func:`pack_layout` and the parts of a :class:`Noise`.

        Without noise, no tokens are chosen.
        """
        pool = self.model.pool
        numbers, *noise = inputs
        last = size.pages * pool.block_size - 1
        layout = layout_of(numbers, size, pool.block_size, last)
        rows = torch.arange(size.rows, device=self.model.device)
        output = self.model.forward(
            layout,
            num_layers=self.model.config.num_layers,
            collect=collect,
            logits_rows=rows,
        )
        if not noise:
            return StepOutput(output, None)
        assert output.logits is not None
        chosen = choose(output.logits, *noise)
        return StepOutput(output, walk(chosen, layout))
