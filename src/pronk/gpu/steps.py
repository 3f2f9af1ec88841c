"""Steps of few rows: embedding, layers, LM head, choice of tokens and verification as one graph.

A step has the sizes of a *bucket*, so that few graphs serve all batches: 16, 64 or 128 rows, and a
context of a power of 2. The host sends the numbers of :mod:`pronk.gpu.layout` and the noise of the
rows, and receives the target's tokens along the accepted paths (:mod:`pronk.gpu.walk`).

Without CUDA, the same function is called as it is, for the rows of the batch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pronk.backends import ForwardBatch
from pronk.gpu.choose import Noise, choose
from pronk.gpu.layout import Integers, LayoutSize, layout_of, measure, pack_layout
from pronk.gpu.model import GpuModel, ModelOutput
from pronk.gpu.walk import walk

ROW_BUCKETS = (16, 64, 128)
# Smallest context of a bucket, in tokens: one split of attention.
_MIN_CONTEXT = 1024


class StepOutput(NamedTuple):
    """Result of a step on the device; a graph overwrites it at its next launch."""

    output: ModelOutput
    # int32 ``[rows]``: result of :func:`pronk.gpu.walk.walk`; ``None``: no tokens were asked for
    walked: Tensor | None


def bucket_of(size: LayoutSize, block_size: int) -> LayoutSize | None:
    """Return the sizes of the step that has room for a batch; ``None``: no step has."""
    rows = next((rows for rows in ROW_BUCKETS if rows >= size.rows), None)
    if rows is None or size.depth > rows or size.paths > rows:
        return None
    pages = max(_MIN_CONTEXT // block_size, triton.next_power_of_2(size.pages))
    return LayoutSize(rows, triton.next_power_of_2(size.entries), pages, rows, rows)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Inputs of a step on the device."""

    layout: Tensor  # the array of :func:`pack_layout`
    noise: tuple[Tensor, ...]  # keys and temperatures; empty: no tokens are chosen

    @classmethod
    def of(cls, numbers: Integers, noise: Noise | None) -> _Inputs:
        return cls(torch.from_numpy(numbers), tuple(torch.from_numpy(part) for part in noise or ()))

    def to(self, device: torch.device) -> _Inputs:
        return _Inputs(self.layout.to(device), tuple(part.to(device) for part in self.noise))

    def update(self, other: _Inputs) -> None:
        """Overwrite the numbers, at the same addresses."""
        self.layout.copy_(other.layout)
        for own, new in zip(self.noise, other.noise, strict=True):
            own.copy_(new)


class Steps:
    """Runs the steps of a model, each bucket by a graph of its own.

    Attributes:
        model: the model.
        pads: whether a step has the sizes of its bucket; on a CPU, only tests want that.
    """

    def __init__(self, model: GpuModel) -> None:
        self.model = model
        self.pads = model.device.type == "cuda"
        self._graphs: dict[tuple[LayoutSize, frozenset[int], bool], _CapturedStep] = {}
        self._version = model.pool.version

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
        context = size.pages * pool.block_size
        if self.model.reserve_positions(context) or pool.version != self._version:
            self._graphs.clear()
            self._version = pool.version
        numbers = pack_layout(batch, pool, size, pool.free_slot)
        noise = None if make_noise is None else make_noise(size.rows)
        inputs = _Inputs.of(numbers, noise)
        function = partial(self._compute, size, collect)
        if self.model.device.type != "cuda":
            return function(inputs.to(self.model.device))
        key = (size, collect, noise is not None)
        if key not in self._graphs:
            self._graphs[key] = _CapturedStep(function, inputs.to(self.model.device))
        return self._graphs[key].run(inputs)

    @torch.inference_mode()
    def _compute(self, size: LayoutSize, collect: frozenset[int], inputs: _Inputs) -> StepOutput:
        pool = self.model.pool
        last = size.pages * pool.block_size - 1
        layout = layout_of(inputs.layout, size, pool.block_size, last)
        rows = torch.arange(size.rows, device=self.model.device)
        output = self.model.forward(
            layout,
            num_layers=self.model.config.num_layers,
            collect=collect,
            logits_rows=rows,
        )
        if not inputs.noise:
            return StepOutput(output, None)
        assert output.logits is not None
        chosen = choose(output.logits, *inputs.noise)
        return StepOutput(output, walk(chosen, layout))


class _CapturedStep:
    """A CUDA graph of a step."""

    def __init__(self, function: Callable[[_Inputs], StepOutput], inputs: _Inputs) -> None:
        self._inputs = inputs
        # The first call compiles the kernels, which a capture cannot do.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(inputs)

    def run(self, inputs: _Inputs) -> StepOutput:
        self._inputs.update(inputs)
        self._graph.replay()
        return self._output
